"""The output of a run: progress, losses, and the utilisation of the machine."""
