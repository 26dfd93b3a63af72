"""Show what the ranks of a running job are doing (`echelon status`)."""
