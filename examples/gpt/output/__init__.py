"""The output of a run: progress, losses, and the utilization of the machine."""
