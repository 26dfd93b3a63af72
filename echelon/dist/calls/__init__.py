"""The calls of a group: checked arguments in, one operation out."""
