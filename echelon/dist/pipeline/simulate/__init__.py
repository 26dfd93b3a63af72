"""Simulate the cost of a plan, draw the plan, and search for a cheap plan, all without torch."""
