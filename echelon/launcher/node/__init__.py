"""One node's part of a job: workers, guard, environment, processors, control groups and rings."""
