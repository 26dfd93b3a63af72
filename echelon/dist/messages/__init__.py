"""Provide messages between two ranks: matching, flow control, and the thread that moves bytes."""
