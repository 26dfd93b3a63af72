"""Write a process's black box."""
