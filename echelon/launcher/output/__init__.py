"""Write the workers' output to files and to the terminal."""
