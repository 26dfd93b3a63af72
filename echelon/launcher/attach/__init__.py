"""Attaching to a job of another launcher: find its ranks, look at them twice, and explain."""
