"""Provide echelon's engine for ranks on one host, which uses shared memory."""
