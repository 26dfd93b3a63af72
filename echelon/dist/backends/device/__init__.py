"""Backends for arrays on a device."""
