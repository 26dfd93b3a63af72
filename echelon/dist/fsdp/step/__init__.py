"""Run a training step by carrying out the order's decisions."""
