"""Schedules as data: actions, plans, what they need, and whether they can run. Needs no torch."""
