"""Find and examine the ranks of a job that another launcher started, and explain its state."""
