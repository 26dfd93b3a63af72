"""Messages between stages on different ranks: outputs go forward, and their gradients backward."""
