"""Manage a library's communicators and call their operations."""
