"""Release and reallocate the memory behind persistent tensors, on the host and on devices."""
