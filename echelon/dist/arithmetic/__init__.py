"""Reduce arrays on the host, and perform small operations in a single exchange."""
