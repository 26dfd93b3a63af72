"""The model, its sizes, and what it writes."""
