"""Read the dumps of torch's flight recorders, formats 2.x; `states.py` lists the recorders."""
