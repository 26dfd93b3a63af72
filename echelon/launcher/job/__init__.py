"""What is left of a job: the run directory and the report."""
