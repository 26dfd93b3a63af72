"""Adapt or reject calls that expect full parameters."""
