"""Writing a process's black box."""
