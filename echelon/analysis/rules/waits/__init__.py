"""Detect ranks that wait, and the ranks that keep them waiting."""
