"""Match collectives and messages between ranks, and build the wait-for graph."""
