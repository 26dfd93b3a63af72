"""The model, its sizes, and text generation."""
