"""Build the errors that a group's operations raise."""
