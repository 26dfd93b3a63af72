"""Detect which ranks are waiting, and for which ranks."""
