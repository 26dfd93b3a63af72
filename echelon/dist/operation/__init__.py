"""Describe operations: calls whose arguments have been checked, with flat views of their arrays."""
