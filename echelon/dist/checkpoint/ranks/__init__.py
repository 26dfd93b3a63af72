"""The ranks that save and load a checkpoint together."""
