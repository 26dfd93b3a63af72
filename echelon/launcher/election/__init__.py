"""Replace a lost hosting node by an election among the remaining nodes."""
