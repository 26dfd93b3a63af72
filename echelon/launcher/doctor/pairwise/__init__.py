"""Implement `echelon doctor --pairwise`, which measures the links of a job before it starts."""
