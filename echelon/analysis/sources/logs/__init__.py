"""The ranks' log files as evidence, where nothing else was left."""
