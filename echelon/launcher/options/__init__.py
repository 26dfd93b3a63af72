"""Define and parse the options of `echelon run`."""
