"""Keep copies of a rank's shards after the rank is lost, and restore a state from them."""
