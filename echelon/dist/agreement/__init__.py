"""Let one rank request an action that all ranks carry out at the same call."""
