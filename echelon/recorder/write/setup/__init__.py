"""Start and stop the recorder of a process: its settings, its ring's place and its hooks."""
