"""Decide which nodes take part in a world, run the store where ranks meet, and start the ranks."""
