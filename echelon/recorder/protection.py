"""Protect readers of mapped rings against truncation of the files.

Reading a page beyond the end of the file raises SIGBUS. In this case, the C core's signal handler
replaces the mapping with zeroed memory. Without the C core, the process dies.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any

try:
    _native: Any = importlib.import_module("echelon.recorder._native")
except ImportError:
    _native = None


def protect(memory: mmap.mmap) -> int:
    """Protect a mapping; return a handle for `release`, or 0 if protection is not possible."""
    return 0 if _native is None else int(_native.protect(memory))


def release(protected: int) -> None:
    """Stop protecting a mapping. Call this before closing the mapping."""
    if protected:
        _native.release(protected)
