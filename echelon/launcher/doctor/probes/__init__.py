"""Probes: one small check each, in a separate process that must answer before a deadline."""
