"""Write the ring file: slots, texts and retained operations."""
