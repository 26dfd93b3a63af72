"""Compare the ranks' streams of calls."""
