"""Provide the backends for arrays on a device."""
