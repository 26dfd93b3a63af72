"""Carry out operations on device streams, or with a host engine through pinned memory."""
