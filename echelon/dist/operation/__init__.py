"""Describe operations: calls with checked arguments and flat views of their arrays."""
