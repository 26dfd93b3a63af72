"""The construction and wording of the errors of a group's operations."""
