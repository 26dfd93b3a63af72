"""Define a group's calls. Each call checks its arguments and starts one operation."""
