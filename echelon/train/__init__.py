"""What a trainer needs beside the parallel runtime: losses, optimizers, schedules, averages.

Nothing is imported here: each part is imported from where it lives, so that a command which only
draws figures does not load torch.
"""
