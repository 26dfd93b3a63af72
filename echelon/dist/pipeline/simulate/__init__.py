"""The cost of a plan, as numbers and pictures, and the search for a cheap one, without torch."""
