"""Implement `echelon doctor --pairwise`, which measures a job's links before the job starts."""
