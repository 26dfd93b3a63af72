"""The training text: its origin, its tokens, and the baseline that it gives."""
