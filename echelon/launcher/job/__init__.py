"""Manage the files of a job: the run directory and the report."""
