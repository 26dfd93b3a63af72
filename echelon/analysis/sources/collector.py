"""Disable cyclic garbage collection while thousands of files are being read.

A loaded dump consists of millions of plain objects that form no cycles. The collector would scan
them again and again without finding anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable cyclic garbage collection within the `with` block, if it was enabled."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
