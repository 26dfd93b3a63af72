"""Detect faults by analyzing which ranks are waiting for which others."""
