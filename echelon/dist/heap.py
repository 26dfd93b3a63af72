"""Make the C library retain freed memory between training steps.

Training on the CPU allocates and frees hundreds of megabytes in every step. By default, glibc
returns much of this memory to the system, and every page must be faulted in and zeroed again. In a
model of 85M parameters, page faults took a sixth of a step's CPU time
(see docs/benchmarks/sharding.md).
Sharding and pipelines on the host therefore ask glibc to retain freed memory. Peak resident memory
then exceeds the size of the tensors by up to a third (docs/planner.md, "How far off it was"). To
save memory at the expense of time, set MALLOC_MMAP_THRESHOLD_=131072 in the program's environment.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
_NEVER = (1 << 31) - 1
_LARGEST = 32 << 20  # the most that glibc accepts
_PAD = 64 << 20
_SET_BY_USER = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@functools.lru_cache(maxsize=1)
def keep() -> bool:
    """Ask glibc to retain freed memory; return whether glibc accepted the settings.

    Settings in the program's environment take precedence. The function has no effect on other C
    libraries.
    """
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)
