"""The hosting node's part: membership, attempts, decisions, and the job's store."""
