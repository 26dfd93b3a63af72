"""Readers of the dumps of torch's flight recorders, formats 2.x: see states.py for their kinds."""
