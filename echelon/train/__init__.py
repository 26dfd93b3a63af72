"""Training components beside the parallel runtime: losses, optimizers, schedules, averages.

This package imports nothing: import each part from its own module, so that a command which only
draws figures does not load torch.
"""
