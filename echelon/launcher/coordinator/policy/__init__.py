"""Decide whether and how to restart a job, with pure functions over a table of causes."""
