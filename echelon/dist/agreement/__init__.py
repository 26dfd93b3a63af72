"""Let one rank request a stop or a timed save that all ranks carry out at the same call."""
