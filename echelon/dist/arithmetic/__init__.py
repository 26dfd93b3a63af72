"""Provide reductions on the host, and small operations that travel with the comparison of calls."""
