"""The contents of a unit: its parameters as flat vectors, divided among ranks."""
