"""Represent schedules as data: actions, plans, dependencies and checks. Torch is not needed."""
