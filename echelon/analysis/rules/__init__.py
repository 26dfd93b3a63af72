"""The rules of the diagnosis. Each rule is a pure function from a `Picture` to findings."""
