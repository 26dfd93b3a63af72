"""Exchange messages between stages on different ranks: outputs forward, and gradients backward."""
