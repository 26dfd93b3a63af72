"""Define the rules by family; each is a small pure function from a `Picture` to findings."""
