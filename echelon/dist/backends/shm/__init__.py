"""Provide the shared-memory engine for ranks on one host."""
