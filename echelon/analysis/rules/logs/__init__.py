"""Diagnose jobs for which only the ranks' logs exist."""
