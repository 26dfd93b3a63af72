"""Plan a training job: find the layouts that fit in memory, and estimate which is fastest."""
