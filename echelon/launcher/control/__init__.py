"""The control plane: connect the agents on a job's nodes to the coordinator."""
