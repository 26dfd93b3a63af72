"""Simulate a plan's cost, draw the plan, and search for a cheap plan; torch is not needed."""
