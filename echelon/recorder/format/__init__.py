"""What a black box holds, and where in its file."""
