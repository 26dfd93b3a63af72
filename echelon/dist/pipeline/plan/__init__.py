"""Schedules as data: actions, plans, and their dependencies and checks. Does not need torch."""
