"""Read the ranks' log files as evidence when there is no other."""
