"""The common parts of all benchmark scripts: rounds in random order, conditions, and tables."""
