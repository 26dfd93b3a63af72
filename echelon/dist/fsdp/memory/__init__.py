"""Memory that comes and goes under tensors which stay: on the host and on devices."""
