"""Tensor parallelism: divides layers among ranks, using differentiable collectives."""
