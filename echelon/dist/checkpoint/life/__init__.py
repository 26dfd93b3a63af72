"""Decide when to save checkpoints, which of them to keep, and which one to load."""
