"""Detect stalled jobs, from the agent or, without an agent, from inside each process."""
