"""Decide whether and how to restart a job, by pure functions over a table of causes."""
