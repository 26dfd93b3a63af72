"""Provide the backends for device arrays."""
