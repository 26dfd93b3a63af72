"""Manage checkpoints over time: find the newest, choose which to keep, and decide when to save."""
