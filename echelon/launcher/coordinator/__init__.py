"""Run the coordinator, which decides for all nodes of a job and runs on the hosting node."""
