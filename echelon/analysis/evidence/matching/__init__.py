"""Match collectives and messages between ranks, and find which ranks wait for which."""
