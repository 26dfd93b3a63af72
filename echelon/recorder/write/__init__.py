"""The writer of a process's black box."""
