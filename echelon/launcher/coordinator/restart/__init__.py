"""Decide when, how often, and on which nodes a job restarts after a failed attempt."""
