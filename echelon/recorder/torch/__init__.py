"""Record torch programs that do not import echelon, through hooks that never raise."""
