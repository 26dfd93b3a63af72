"""What a run prints and logs: progress, losses, and the share of the machine's peak."""
