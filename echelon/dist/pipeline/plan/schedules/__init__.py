"""The schedules, as pure functions from (ranks, micro-batches, chunks) to rows of actions."""
