"""Rules that have only the ranks' logs."""
