"""The calls of a group: each checks its arguments and starts one operation."""
