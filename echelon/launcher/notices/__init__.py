"""What a job tells the outside: notices to a command or a URL, and metrics."""
