"""Detect signs of trouble in a single rank, both from inside and from outside its process."""
