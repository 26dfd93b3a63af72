"""Restart a job after a failed attempt: when, how often, and on which nodes."""
