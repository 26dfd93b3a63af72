"""What follows a failed attempt: a table of causes, and pure functions over it."""
