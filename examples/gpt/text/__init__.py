"""The text that the model learns: where it comes from, its tokens, and the bar that it sets."""
