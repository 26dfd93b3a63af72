"""Write the records of operations."""
