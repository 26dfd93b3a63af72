"""One training step: hooks report events, the driver carries out what the order decides."""
