"""Read the ranks' log files as evidence, if no other evidence exists."""
