"""Provide the wire protocol: encoding, limits, authentication, and sealed records."""
