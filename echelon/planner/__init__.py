"""Plan a training job: find the layouts that fit into memory, and estimate which is fastest.

The planner turns sizes into estimates. Nothing here loads torch or starts a process. `measure` and
`pairs` run as separate jobs, to measure links and processors.
"""
