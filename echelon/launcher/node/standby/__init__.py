"""Standbys: processes that have loaded their libraries and wait to become a rank."""
