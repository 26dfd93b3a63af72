"""Detect ranks that are waiting, and the ranks that keep them waiting."""
