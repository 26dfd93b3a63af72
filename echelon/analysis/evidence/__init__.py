"""What was recorded, and what follows from it: rows, lanes, streams, waits, stacks, times."""
