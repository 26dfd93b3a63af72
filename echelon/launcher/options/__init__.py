"""The options of `echelon run`: parsing, and defaults of a scheduler."""
