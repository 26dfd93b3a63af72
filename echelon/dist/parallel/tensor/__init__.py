"""Tensor parallelism: layers divided among ranks, by collectives that autograd knows."""
