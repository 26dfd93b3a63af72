"""Real Gloo, through PyTorch's build of it, on our store: the engine between hosts."""
