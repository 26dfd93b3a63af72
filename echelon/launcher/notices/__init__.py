"""A job's messages to the outside: notices to a command or a URL, and metrics."""
