"""Disable the cycle collector while thousands of files are read.

A loaded dump consists of millions of plain objects without cycles, which the collector would scan
repeatedly without finding anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cycle collector inside the context, if it was enabled."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
