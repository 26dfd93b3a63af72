"""Each node's part: its workers, their guard, environment, processors, control groups and rings."""
