"""Show what the ranks of a job are doing, as read from their rings (`echelon status`)."""
