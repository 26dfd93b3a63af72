"""Write operations: their fields, arguments and states."""
