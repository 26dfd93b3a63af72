"""The life of checkpoints: which is the newest, which are kept, when the next one is due."""
