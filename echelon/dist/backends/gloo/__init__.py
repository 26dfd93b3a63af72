"""Real Gloo, from PyTorch's build, on echelon's store: the engine between hosts."""
