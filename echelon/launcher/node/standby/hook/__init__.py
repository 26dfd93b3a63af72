"""A folder that is placed at the front of a standby's PYTHONPATH."""
