"""Coordinate the ranks that save and load a checkpoint."""
