"""Learn time limits from the usual durations of a job's operations and phases."""
