"""`echelon doctor`: checks of this machine and across the nodes of a job."""
