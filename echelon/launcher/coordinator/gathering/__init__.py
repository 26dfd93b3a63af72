"""Choose the nodes of a world, run the store for the ranks' rendezvous, and start the ranks."""
