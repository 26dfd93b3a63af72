"""A training step: alone, over replicas, shards or pipeline stages."""
