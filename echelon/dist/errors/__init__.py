"""The errors of a group's operations: how each is built and worded."""
