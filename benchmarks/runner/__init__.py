"""What all benchmark scripts share: rounds in random order, conditions, results in one form."""
