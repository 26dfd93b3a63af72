"""The ranks' log files as evidence, if nothing else is left."""
