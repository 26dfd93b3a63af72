"""The recorder of this process: `current()`. It has at most one.

It records into `ring.py`'s file, in the folder that the launcher names in the environment
(ECHELON_RANK_DIR) or the user does (ECHELON_RECORD_DIR); without one, or with
ECHELON_RECORDER_SIZE=0, there is none, and every call that users make is a cheap no-op, so that
code which records never asks whether it does.

[Note: who may record] A ring belongs to one process. A fork inherits the mapping, so in the child
the recorder is switched off (`os.register_at_fork`); a process that multiprocessing started, or
that finds the ring file already there, does not record at all. Else a DataLoader's workers would
write their parent's story.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from echelon.recorder.environment import Settings

if TYPE_CHECKING:
    from echelon.recorder.recorder import Recorder

_recorder: Recorder | None = None
_leave: Callable[[], None] | None = None
_opened = False
_open_lock = threading.Lock()


def current() -> Recorder | None:
    """Return this process's recorder, opening it on the first call; None if nothing is recorded."""
    return _recorder if _opened else _open()


def if_opened() -> Recorder | None:
    """Return this process's recorder if `current` has opened it."""
    return _recorder


def _open() -> Recorder | None:
    global _recorder, _leave, _opened
    with _open_lock:
        if _opened:
            return _recorder
        settings = Settings.from_environment()
        if settings.records and _may_record():
            from echelon.recorder.start import start

            try:
                _recorder, _leave = start(settings) or (None, None)
            except OSError as err:
                folder = settings.rank_dir or settings.record_dir
                warnings.warn(f"not recording: {folder}: {err}", stacklevel=3)
        _opened = True
        return _recorder


def _may_record() -> bool:
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is None or multiprocessing.parent_process() is None


def _forget_after_fork() -> None:
    global _recorder, _leave, _opened, _open_lock
    if _leave is not None:
        _leave()
    _recorder, _leave = None, None
    _opened = False
    _open_lock = threading.Lock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
