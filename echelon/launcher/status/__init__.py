"""`echelon status`: what ranks do, read from their rings."""
