"""Plan a training job: find the layouts that fit into memory and estimate the fastest of them.

The planner turns sizes into estimates. Nothing here loads torch or starts a process, except
`measure`, which runs as a separate job that measures the links and processors.
"""
