"""Build and check the documentation."""
