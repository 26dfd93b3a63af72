"""From a state to what is stored of it, and back."""
