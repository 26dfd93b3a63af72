"""The schedules: pure functions from (ranks, micro-batches, chunks) to rows."""
