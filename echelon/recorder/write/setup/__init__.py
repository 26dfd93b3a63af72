"""Start and stop the recorder of a process."""
