"""The contents of a unit: its parameters as flat vectors, which are divided among ranks."""
