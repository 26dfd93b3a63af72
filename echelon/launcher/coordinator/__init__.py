"""Coordinate a job from its hosting node."""
