"""The recorded facts in one form: rows, lanes, streams, waits, stacks, times."""
