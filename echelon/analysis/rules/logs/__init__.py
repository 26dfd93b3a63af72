"""What the ranks' logs alone can say."""
