"""Detect collectives that do not match: signatures, sizes, splits, slipped streams."""
