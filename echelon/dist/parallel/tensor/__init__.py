"""Divide layers among ranks (tensor parallelism), using differentiable collectives."""
