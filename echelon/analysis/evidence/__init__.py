"""Represent the recorded facts in a common form: rows, lanes, streams, waits, stacks, times."""
