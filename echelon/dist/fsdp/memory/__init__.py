"""Release and reallocate the memory of persistent tensors, on the host and on devices."""
