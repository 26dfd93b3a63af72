"""Explain the state of a running job that was started by any launcher, such as torchrun."""
