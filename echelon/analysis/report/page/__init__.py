"""Render the report as one HTML file."""
