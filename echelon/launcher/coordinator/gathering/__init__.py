"""Decide which nodes take part in a job, where their ranks meet, and how the ranks start."""
