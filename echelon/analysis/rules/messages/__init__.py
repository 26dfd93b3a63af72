"""Detect sends and receives that do not match."""
