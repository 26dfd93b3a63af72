"""Manage operations in progress: execute them, wait for them, and determine how they end."""
