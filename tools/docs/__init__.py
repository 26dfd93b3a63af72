"""Builds and checks the documentation."""
