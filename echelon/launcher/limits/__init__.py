"""Learn limits from the job itself: how long its operations and phases usually take."""
