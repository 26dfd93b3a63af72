"""Adapt or refuse calls that expect whole parameters."""
