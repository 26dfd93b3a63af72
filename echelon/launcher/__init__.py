"""Implement `echelon run`: start the ranks of a job, watch them, and explain failures."""
