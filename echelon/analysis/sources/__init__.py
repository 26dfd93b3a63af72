"""Readers: from a folder of black boxes, or of torch's dumps, to evidence."""
