"""What passes between stages on different ranks: outputs forward, their gradients back."""
