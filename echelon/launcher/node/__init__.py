"""Run a job's workers on one node."""
