"""Learn limits from the job itself, by how long its operations and phases usually take."""
