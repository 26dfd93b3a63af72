"""Reductions on the host, and small operations that are carried by the comparison of calls."""
