"""Collect the dumps of an incident, analyze them, and show the culprit's last output."""
