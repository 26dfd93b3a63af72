"""The folder at the front of a standby's PYTHONPATH."""
