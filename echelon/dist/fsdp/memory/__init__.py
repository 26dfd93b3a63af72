"""Releases memory under persistent tensors and allocates it again, on the host and on devices."""
