"""Check this machine and the nodes of a job (`echelon doctor`)."""
