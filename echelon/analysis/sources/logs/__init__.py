"""Read the ranks' log files as evidence if there are no dumps."""
