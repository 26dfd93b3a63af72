"""The lifecycle of checkpoints: the newest one, the ones to keep, and when the next one is due."""
