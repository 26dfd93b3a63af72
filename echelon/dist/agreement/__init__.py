"""Decisions of one rank that take effect on all ranks at the same call: stopping, timed saves."""
