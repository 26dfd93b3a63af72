"""Manage a library's communicators and launch operations on them."""
