"""Keep the cycle collector quiet while thousands of files are read.

The objects of a loaded dump are plain and hold no cycles, and there are millions of them: the
collector would walk them again and again and find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the cycle collector off inside the block, if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
