"""Run one node's part of a job."""
