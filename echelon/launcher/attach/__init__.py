"""Explain the state of a running job that another launcher started."""
