"""Signs of trouble in a single rank, seen from inside and from outside."""
