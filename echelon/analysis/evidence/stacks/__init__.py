"""Parse stacks, and merge those of all ranks into a tree."""
