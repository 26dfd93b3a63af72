"""Decide whether and how to restart a job, using pure functions and a table of causes."""
