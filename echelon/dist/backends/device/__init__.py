"""Backends whose arrays lie on a device."""
