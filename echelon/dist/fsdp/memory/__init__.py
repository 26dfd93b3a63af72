"""Memory that is released and reallocated under persistent tensors, on the host and on devices."""
