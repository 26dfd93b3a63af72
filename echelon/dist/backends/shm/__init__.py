"""Echelon's engine for ranks on one host, over shared memory."""
