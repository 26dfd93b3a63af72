"""Provide `current()`, which returns this process's recorder or None.

The recorder writes a ring file (`write/ring/ring.py`) into the folder that ECHELON_RANK_DIR or
ECHELON_RECORD_DIR names. Without such a folder, or with ECHELON_RECORDER_SIZE=0, the process has no
recorder, and calls to `span`, `step` and `watch` record nothing.

[Note: who may record] A ring belongs to one process. After a fork, the recorder is switched off in
the child. A process does not record if the ring file in its folder belongs to a live process. A
process that was started by multiprocessing, such as a DataLoader's worker, does not record unless
it joins a world as a rank. It then records in a subfolder of its parent's folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.recorder.write.setup.environment import Settings

if TYPE_CHECKING:
    from echelon.recorder.write.recorder import Recorder

_recorder: Recorder | None = None
_leave: Callable[[], None] | None = None
_opened = False
_open_lock = threading.Lock()


def current() -> Recorder | None:
    """Return this process's recorder, or None if this process is not recording.

    The first call opens the recorder.
    """
    return _recorder if _opened else _open()


def if_opened() -> Recorder | None:
    """Return this process's recorder if it is already open, otherwise None."""
    return _recorder


def record_as_rank(rank: int, world_size: int) -> None:
    """Start recording as the given rank if multiprocessing started this process."""
    global _opened
    if not _was_spawned():
        return
    with _open_lock:
        settings = Settings.from_environment()
        folder = settings.rank_dir or settings.record_dir
        if _recorder is None and folder is not None and settings.records:
            own = replace(
                settings,
                rank_dir=None,
                record_dir=folder,
                ring_dir=None if settings.has_agent else settings.ring_dir,
                rank=rank,
                world_size=world_size,
                was_spawned=True,
            )
            _start(own)
            _opened = True


def _open() -> Recorder | None:
    global _opened
    with _open_lock:
        if _opened:
            return _recorder
        settings = Settings.from_environment()
        if settings.records and not _was_spawned():
            _start(settings)
        _opened = True
        return _recorder


def _start(settings: Settings) -> None:
    global _recorder, _leave
    try:
        from echelon.recorder.write.setup.start import start

        _recorder, _leave = start(settings) or (None, None)
    except Exception as err:  # noqa: BLE001 -- a program trains without its record
        say(f"not recording: {settings.rank_dir or settings.record_dir}: {err}")


def say(text: str) -> None:
    """Print one line to standard error, if the process has one."""
    with contextlib.suppress(Exception):
        print(f"echelon: {text}", file=sys.stderr)


def _was_spawned() -> bool:
    """Return whether multiprocessing started this process."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _forget_after_fork() -> None:
    global _recorder, _leave, _opened, _open_lock
    if _leave is not None:
        _leave()
    _recorder, _leave = None, None
    _opened = False
    _open_lock = threading.Lock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
