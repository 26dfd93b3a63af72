"""Provide the engine for groups that span several hosts, which uses PyTorch's build of Gloo."""
