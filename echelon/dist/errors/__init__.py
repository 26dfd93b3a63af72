"""Build the errors of a group's operations, including their messages."""
