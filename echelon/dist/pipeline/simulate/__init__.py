"""Simulates the cost of a plan, draws it, and searches for a cheap plan, all without torch."""
