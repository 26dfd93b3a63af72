"""Define the rules, by family; each rule is a small pure function from a `Picture` to findings."""
