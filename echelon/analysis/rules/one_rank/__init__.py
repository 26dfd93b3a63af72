"""Detect signs of trouble in a single rank, seen from inside and from outside."""
