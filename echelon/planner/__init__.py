"""`echelon plan`: which layouts of a training fit the memory, and which should be fastest.

Sizes in, estimates out: nothing here loads torch or starts a process, but for `measure`, which a
job of its own runs to learn what its links and processors do.
"""
