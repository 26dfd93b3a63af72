"""Run a training step by carrying out the decisions of `Order`."""
