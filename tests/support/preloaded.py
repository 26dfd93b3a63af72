"""Import the modules that the ranks of tests need, in the fork server of `ranks.py`.

Each rank imports its test's module, which imports pytest and echelon's packages and would take 0.2
to 0.4 s of CPU time. With this module, the cost is paid once per test process. None of the imports
may start a thread, because ranks are forked from the process that imports this module.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util

_ALWAYS = (
    "numpy",
    "pytest",
    "echelon.dist",
    "echelon.dist.backends.shm.backend",
    "echelon.recorder.read",
    "echelon.store.server",
)
_WITH_TORCH = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process loads it, which takes seconds
    "echelon.dist.checkpoint",
    "echelon.dist.fsdp",
    "echelon.dist.mesh",
    "echelon.dist.pipeline",
)

for _name in _ALWAYS + (_WITH_TORCH if importlib.util.find_spec("torch") else ()):
    importlib.import_module(_name)
gc.collect()
gc.freeze()  # a collection in a rank would visit, and thereby copy, all that was loaded here
