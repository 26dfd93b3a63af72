"""The options of `echelon run`: how they are parsed, and the defaults that a scheduler provides."""
