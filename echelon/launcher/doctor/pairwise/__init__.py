"""`echelon doctor --pairwise`: measure the links of a job before it starts."""
