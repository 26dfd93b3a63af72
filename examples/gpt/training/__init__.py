"""A training step: on one rank, or over replicas, shards or pipeline stages."""
