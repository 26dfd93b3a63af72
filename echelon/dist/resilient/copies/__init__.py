"""Copy each rank's shards, and restore the state from the copies after a rank is lost."""
