"""Provide the engine for groups on several hosts. It uses PyTorch's build of Gloo."""
