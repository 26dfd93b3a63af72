"""Record torch programs that do not import echelon."""
