"""Find errors that a program caught and survived, and whether it continued after them."""
