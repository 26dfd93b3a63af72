"""Messages between stages on different ranks: outputs forward, their gradients backward."""
