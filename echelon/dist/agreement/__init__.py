"""Decisions of one rank that take effect on all ranks at the same call: stops and timed saves."""
