"""Define the calls of a group, each of which checks its arguments and starts one operation."""
