"""Decide when to save checkpoints, which checkpoints to keep, and which checkpoint to load."""
