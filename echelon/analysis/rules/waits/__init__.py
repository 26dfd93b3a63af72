"""Detect ranks that are waiting, and the ranks for which they wait."""
