"""Read a worker's stacks from outside its process or, failing that, request them with a signal.

A signal interrupts the system call in which a thread is waiting, and can end the hang that is being
examined. Signals are therefore a last resort, and `HostFacts.stacks_from` records their use.
"""

from __future__ import annotations

import time
from pathlib import Path

from echelon.host import process
from echelon.host.facts import OUTSIDE, SIGNAL, TRACING
from echelon.host.native_stacks import native_stacks
from echelon.host.stacks import spy_stacks
from echelon.recorder.format.schema import Identity

_SETTLED_S = 0.06
_STACKS_BYTES = 64 << 10


class Stacks:
    """The stacks of one process's threads at one moment."""

    def __init__(self, folder: Path, pid: int, identity: Identity, *, native: bool) -> None:
        self.native = ""
        self.not_permitted: tuple[str, ...] = ()  # (TRACING,) if the process may not be traced
        self._wants_native = native
        self._path = folder / "stacks"
        self._pid = pid
        self._identity = identity
        self._spied = ""
        self._asked = False
        self._from = 0
        self._seen = (0, 0.0)

    def ask(self) -> None:
        """Request the process's stacks with a signal, unless `spy` has already read them."""
        identity = self._identity
        if self._spied or not identity.stack_signal or not self._can_answer():
            return
        self._from = _size(self._path)
        self._seen = (self._from, time.monotonic())
        self._asked = process.send(self._pid, identity.pid_start_ticks, identity.stack_signal)

    def _can_answer(self) -> bool:
        """Return whether the signal handler's file descriptor still refers to the stacks file.

        A program that becomes a daemon closes all file descriptors. If another file then gets the
        handler's descriptor number, the handler would write to that file.
        """
        number = self._identity.settings.get("stacks_fd")
        try:
            return Path(f"/proc/{self._pid}/fd/{number}").samefile(self._path)
        except OSError:
            return False

    def have_arrived(self) -> bool:
        """Return whether stacks requested by signal are complete; True if no signal was sent."""
        if not self._asked:
            return True
        size, since = _size(self._path), self._seen[1]
        if size != self._seen[0]:
            self._seen = (size, time.monotonic())
            return False
        return size > self._from and time.monotonic() - since > _SETTLED_S

    def spy(self) -> None:
        """Read the stacks from outside the process, if possible. Can be called on any thread."""
        denied: list[str] = []
        self._spied = spy_stacks(self._pid, denied=denied)
        if self._wants_native:
            self.native = native_stacks(self._pid, denied)[:_STACKS_BYTES]
        self.not_permitted = (TRACING,) if denied else ()

    def text(self) -> str:
        """Return the stacks that `spy` read, or else those that the process wrote when signaled."""
        return self._spied or (_text_from(self._path, self._from) if self._asked else "")

    def origin(self) -> str:
        """Return how the stacks were read; see `HostFacts.stacks_from`."""
        if self._spied:
            return OUTSIDE
        return SIGNAL if self.text() else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_STACKS_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
