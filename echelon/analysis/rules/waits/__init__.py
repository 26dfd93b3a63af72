"""Detect faults from the waits between ranks."""
