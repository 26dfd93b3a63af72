"""The C library's heap: kept from step to step, not released and faulted in again.

A training step on the CPU takes and frees the same few hundred megabytes of activations and
gradients at every step. By default glibc maps large blocks one by one and returns the top of the
heap to the system as soon as it is free; every page is then faulted in and zeroed again, which for
85M parameters cost a sixth of the step's processor time (measured beside FSDP2, see
docs/benchmarks/sharding.md). So sharding and pipelines on the host ask glibc to keep what it has.
Blocks of different sizes leave gaps in a heap: the resident peak is up to a third above what
tensors take (docs/planner.md, "How far off it was"). A program that needs memory more than time
sets MALLOC_MMAP_THRESHOLD_=131072 in its environment.
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
    """Ask glibc to keep freed memory, once; return whether it does.

    It is left alone where the program's environment sets it, and on other C libraries.
    """
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)
