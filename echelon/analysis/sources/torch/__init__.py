"""Read the dumps of torch's flight recorders (formats 2.x)."""
