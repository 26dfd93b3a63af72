"""`echelon run`: starts the ranks of a job, watches them, and says what happened."""
