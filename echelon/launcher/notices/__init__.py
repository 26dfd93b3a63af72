"""Send messages about a job to the outside: notices to a command or a URL, and metrics."""
