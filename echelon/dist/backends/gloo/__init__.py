"""Provide the engine for several hosts: PyTorch's build of Gloo on top of echelon's store."""
