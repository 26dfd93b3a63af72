"""Simulate and draw plans, and search for the fastest plan. Torch is not needed."""
