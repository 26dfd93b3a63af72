"""Renderers of a report: terminal, HTML page, trace."""
