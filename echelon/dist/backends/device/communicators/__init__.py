"""Own the communicators of a library: their calls, their lanes and their end."""
