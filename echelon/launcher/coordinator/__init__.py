"""Coordinate all nodes of a job from the hosting node."""
