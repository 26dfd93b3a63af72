"""Write the ring file: slots, strings and retained operations."""
