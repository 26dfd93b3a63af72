"""Provide the engine for several hosts, which uses PyTorch's build of Gloo."""
