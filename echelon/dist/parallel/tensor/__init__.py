"""Shard layers across ranks (tensor parallelism), using differentiable collectives."""
