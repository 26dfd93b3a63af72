"""Run the hosting node's part of a job: membership, attempts, decisions, and the store."""
