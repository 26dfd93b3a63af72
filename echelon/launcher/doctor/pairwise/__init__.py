"""`echelon doctor --pairwise`: the links of a job, measured before it."""
