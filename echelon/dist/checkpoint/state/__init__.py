"""Convert a state to its stored form and back."""
