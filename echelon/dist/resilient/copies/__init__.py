"""Copies of a rank's shards that outlive the rank, and how survivors restore a state from them."""
