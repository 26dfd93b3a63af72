"""Lets one rank request a stop or a timed save, which all ranks then carry out at the same call."""
