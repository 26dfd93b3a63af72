"""Read a folder of black boxes, or of torch's dumps, as evidence."""
