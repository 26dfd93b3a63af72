"""Handle the workers' output: files, the terminal, and the folding of repeated lines."""
