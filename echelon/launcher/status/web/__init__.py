"""Serve the live page of a job."""
