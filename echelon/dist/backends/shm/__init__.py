"""Our own engine for ranks of one host: NumPy over shared memory."""
