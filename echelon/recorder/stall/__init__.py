"""What counts as a stall, and the watch inside a process without an agent."""
