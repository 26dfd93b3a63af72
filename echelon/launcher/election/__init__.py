"""Succession of the hosting node: what every node keeps, who votes, and who may run ranks."""
