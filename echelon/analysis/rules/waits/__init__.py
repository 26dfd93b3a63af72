"""Ranks that wait, and those that keep them waiting."""
