"""Parse stacks, and merge the stacks of all ranks into a tree."""
