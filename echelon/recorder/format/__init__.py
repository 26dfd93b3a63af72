"""Define the contents and the file layout of a black box."""
