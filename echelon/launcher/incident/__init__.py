"""Collect the dumps of an incident, analyse them, and show the root cause's output."""
