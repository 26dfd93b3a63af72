"""The schedules: pure functions from the numbers of ranks, micro-batches and chunks to rows."""
