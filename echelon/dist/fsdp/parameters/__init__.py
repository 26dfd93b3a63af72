"""What a unit is made of: its parameters as flat vectors, divided among ranks."""
