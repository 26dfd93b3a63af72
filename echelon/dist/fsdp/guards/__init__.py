"""Adapt or refuse calls that expect full parameters."""
