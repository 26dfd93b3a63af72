"""Collect the dumps of an incident, analyse them, and show the culprit's last output."""
