"""What becomes of a call that cannot be aborted: it is kept, and the process ends without it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

_kept: list[Any] = []


def keep_for_ever(*things: Any) -> None:
    """Keep what a stuck call may still use, and let the process exit without waiting for it."""
    if not _kept:
        _skip_destructors()
    _kept.append(things)


def _skip_destructors() -> None:
    """Have exit() end the process at once: destructors of the library wait for the stuck call."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
