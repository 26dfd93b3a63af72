"""Write the ring file: slots, texts and kept operations."""
