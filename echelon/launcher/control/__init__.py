"""Connect the agents of a job's nodes to the coordinator (the control plane)."""
