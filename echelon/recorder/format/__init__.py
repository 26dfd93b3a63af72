"""Define the contents of a black box and their layout in the file."""
