"""Tensor parallelism: layers divided among ranks with differentiable collectives."""
