"""The stall rule, and the watch inside a process without an agent."""
