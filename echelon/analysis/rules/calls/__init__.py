"""Detect collectives that do not match between ranks."""
