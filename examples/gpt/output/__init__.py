"""The output of a run: progress, losses, and the share of the machine's peak."""
