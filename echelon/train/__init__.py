"""Provide components for training, such as losses, optimizers, schedules and averages.

Each component is imported from its own module. The package itself does not load torch.
"""
