"""The ranks that save and load together."""
