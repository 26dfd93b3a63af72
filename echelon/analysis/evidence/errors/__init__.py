"""Find errors that a program caught and survived."""
