"""Standbys: processes that have loaded their libraries and are waiting to become ranks."""
