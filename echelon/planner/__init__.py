"""Plan a training job: find the layouts that fit into memory, and estimate which is fastest."""
