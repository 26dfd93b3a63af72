"""Readers that turn a folder of black boxes, or of torch's dumps, into evidence."""
