"""Provide the engine between hosts: PyTorch's build of Gloo on top of echelon's store."""
