"""`echelon status`: what the ranks are doing, read from their rings."""
