"""The rules by family, each a small pure function from a `Picture` to findings."""
