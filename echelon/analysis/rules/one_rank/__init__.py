"""What one rank shows of itself, from inside and from outside."""
