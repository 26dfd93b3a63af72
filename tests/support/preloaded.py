"""What the ranks of tests find loaded: the fork server of `ranks.py` imports this module.

Each rank imports the module of its test, and with it pytest and the package's rooms, for 0.2 to
0.4 s of processor time. Here that is paid once per test process. Nothing of it may start a thread:
ranks are forked from the process that imports it.
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
