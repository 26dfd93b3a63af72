"""Let the other ranks continue after a loss, and let new processes replace the lost ranks."""
