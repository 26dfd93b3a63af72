"""Represent the recorded facts in a form that is common to all sources."""
