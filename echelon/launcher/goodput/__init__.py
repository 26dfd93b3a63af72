"""Account for a job's time: how each second of each rank was spent."""
