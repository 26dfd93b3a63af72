"""Keep an attempt running after the loss of ranks, and start processes that replace them."""
