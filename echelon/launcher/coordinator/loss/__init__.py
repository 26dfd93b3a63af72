"""Let the other ranks continue after a loss, and let new processes join in the lost places."""
