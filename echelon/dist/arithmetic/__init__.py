"""Provide reductions on the host, and small operations done in the exchange that compares calls."""
