"""Run a training step: hooks report events, and the driver carries out the order's decisions."""
