"""The workers' output: files, the terminal, and the folding of lines that many ranks print."""
