"""Explain the state of a running job, whichever launcher (such as torchrun) started it."""
