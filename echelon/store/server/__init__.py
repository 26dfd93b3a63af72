"""Provide the server: its loop, its peers and its commands."""
