"""The diagnosis rules: pure functions from a `Picture` to findings."""
