"""The workers' output: files, the terminal, and lines that many ranks print."""
