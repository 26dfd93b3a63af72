"""The restart policy: a table of causes, and pure functions over it."""
