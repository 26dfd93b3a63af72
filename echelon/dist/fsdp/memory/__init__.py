"""Release memory behind persistent tensors and allocate it again, on the host and on devices."""
