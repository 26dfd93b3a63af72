"""The schedules: pure functions of (ranks, micro-batches, chunks) to rows of actions."""
