"""Compare the calls of ranks in the order in which each rank made them."""
