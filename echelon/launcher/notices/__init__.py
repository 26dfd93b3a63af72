"""Send notices about a job to commands and URLs, and serve the job's metrics."""
