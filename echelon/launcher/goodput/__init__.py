"""The account of a job's time: how each second of each rank was spent."""
