"""Provide the wire protocol: encoding, limits, the proof of the secret, and sealed records."""
