"""Disable cyclic garbage collection while thousands of files are being read.

Loaded dumps contain millions of objects but no cycles, so collection would only cost time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable cyclic garbage collection within the `with` block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
