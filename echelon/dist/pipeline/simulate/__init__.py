"""What a plan costs, as numbers and pictures, and the search for a cheap one. Needs no torch."""
