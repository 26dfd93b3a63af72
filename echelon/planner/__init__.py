"""`echelon plan`: which layouts of a training fit into memory, and which should be fastest.

Sizes in, estimates out: nothing here loads torch or starts a process, except `measure`, which runs
as a separate job to measure the links and processors.
"""
