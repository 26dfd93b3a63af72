"""Look at a job that another launcher started: find its ranks, look twice, and explain."""
