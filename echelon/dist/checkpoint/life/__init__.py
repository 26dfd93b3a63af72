"""The lifecycle of checkpoints: which is the newest, which are kept, and when the next is due."""
