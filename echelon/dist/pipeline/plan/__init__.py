"""Represent schedules as data: actions, plans, dependencies and checks. Does not need torch."""
