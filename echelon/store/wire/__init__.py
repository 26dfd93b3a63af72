"""The wire protocol: encoding, limits, the proof of a secret, and sealed records."""
