"""Let one rank request an action that all ranks carry out in the same call."""
