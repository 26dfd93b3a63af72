"""Run one node's part of a job: workers, guard, environment, processors, cgroups and rings."""
