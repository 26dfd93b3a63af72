"""Record how the ranks of a job spend their time."""
