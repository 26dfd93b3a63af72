"""Provide components for training, such as losses, optimizers, schedules and averages.

This package imports nothing. Import each part from its own module, so that a command that only
draws figures does not load torch.
"""
