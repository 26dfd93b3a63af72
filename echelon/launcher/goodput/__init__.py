"""What each second of each rank went into."""
