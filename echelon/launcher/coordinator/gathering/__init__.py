"""Gather the nodes of a job: which nodes take part, where their ranks meet, how they start."""
