"""The options of `echelon run`, and their defaults."""
