"""Replace a lost hosting node: the replicated state, the votes, and the right to run ranks."""
