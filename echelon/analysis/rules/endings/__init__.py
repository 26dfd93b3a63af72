"""Ranks that ended, failed or left no record."""
