"""Keep what a job leaves behind: the run directory and the report."""
