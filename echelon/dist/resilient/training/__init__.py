"""Train the steps, and decide what happens to a step when a rank is lost."""
