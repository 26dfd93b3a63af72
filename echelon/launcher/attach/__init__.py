"""Find the ranks of a job that another launcher started, examine them twice, and explain it."""
