"""Build the errors of a group's operations and their messages."""
