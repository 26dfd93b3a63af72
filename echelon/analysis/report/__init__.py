"""Render a report for the terminal, as an HTML page, or as a trace."""
