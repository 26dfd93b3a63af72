"""Let the process exit while calls that cannot be aborted are still running."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

_kept: list[Any] = []


def keep_for_ever(*things: Any) -> None:
    """Keep a stuck call's memory alive, and let the process exit without waiting for the call."""
    if not _kept:
        _skip_destructors()
    _kept.append(things)


def _skip_destructors() -> None:
    """Make exit() end the process immediately, without running library destructors."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
