"""The wire: commands to bytes and back, their limits, the proof of a secret, sealed records."""
