"""Train step by step, and repeat a step if a rank is lost."""
