"""Learn time limits from the typical durations of a job's operations and phases."""
