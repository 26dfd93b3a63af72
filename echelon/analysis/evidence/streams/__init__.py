"""Compare ranks' calls in the order of the calls on each rank."""
