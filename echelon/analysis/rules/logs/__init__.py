"""Diagnose jobs of which only the ranks' logs exist."""
