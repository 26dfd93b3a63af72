"""The folder that a standby's PYTHONPATH begins with."""
