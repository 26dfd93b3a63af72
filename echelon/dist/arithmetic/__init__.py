"""Reductions on the host, and small operations whose data travels with the comparison of calls."""
