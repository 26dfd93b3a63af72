"""Hooks that record a torch program which does not import echelon. None of them raises."""
