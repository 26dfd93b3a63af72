"""Provide the engine for groups that span several hosts, based on PyTorch's build of Gloo."""
