"""Detect ranks that ended, failed or left no record."""
