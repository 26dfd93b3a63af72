"""Implement `echelon doctor`, which checks this machine and the nodes of a job."""
