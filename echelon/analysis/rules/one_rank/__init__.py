"""Infer what a single rank is doing from its stack, spans and process state."""
