"""Schedules as data: actions, plans, their dependencies and their checks. Does not need torch."""
