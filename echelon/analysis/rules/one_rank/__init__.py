"""Detect signs of trouble in a single rank."""
