"""Probes: one small check each, in a process of its own that must answer by a deadline."""
