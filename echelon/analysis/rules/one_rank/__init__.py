"""Determine from its stack, spans and process state what a single rank is doing."""
