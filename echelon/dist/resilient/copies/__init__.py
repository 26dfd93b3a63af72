"""Keep copies of a rank's shards that outlive the rank, and restore a state from such copies."""
