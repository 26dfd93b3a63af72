"""Provide training components: losses, optimizers, schedules, averages, and others.

This package imports nothing. Import each part from its own module, so that a command which only
draws figures does not load torch.
"""
