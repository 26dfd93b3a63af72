"""The training text: its origin, its tokens, and the baseline loss computed from it."""
