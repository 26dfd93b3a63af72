"""Keep `--standby N` processes ready on this node.

The node's agent manages the standbys, and the guard is their parent. Standbys load one after
another, at idle priority, while training is running steadily. When an attempt starts, each rank
takes a suitable standby if one is ready; otherwise it starts as usual.

If a standby ends unexpectedly, another one is started after a pause, until `_MAX_LOST` standbys
have been lost. In the following cases, no standbys are kept ready, and the reason is reported in
one line:

- A module in the program's folder shadows a library that standbys load.
- The program sets a variable that such a library reads.
- The interpreter does not run the hook (hook/sitecustomize.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from echelon.errors import LaunchError
from echelon.launcher.node.standby.waiting import Waiting, check_environment, environment
from echelon.launcher.node.workers import Exited, Failed, Started, Workers

FIRST_STANDBY = 1 << 24  # indices at the guard from here on are standbys', never a hook's
_IS_THERE = 42  # the exit code of the check: the hook has run
_MAX_LOST = 4
_FIRST_PAUSE_S = 2.0
_LIMIT_S = 300.0  # after which it is given up

Identity = tuple[Mapping[str, str], Collection[int] | None]  # a rank's environment and processors


class Standbys:
    """The standbys on this node.

    Args:
        size: how many standbys to keep ready.
        program: the command line of a worker.
        guard: the connection to the guard that starts the standbys.
        selector: the selector that watches the standbys' control sockets.
        say: a function that prints a line.
    """

    def __init__(
        self,
        size: int,
        program: Sequence[str],
        guard: Workers,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
    ) -> None:
        self._size = size
        self._program = tuple(program)
        self._guard = guard
        self._selector = selector
        self._say = say
        self._next_index = FIRST_STANDBY
        self._check = -1  # the index of the check; -1 before it, and after it
        self._is_checked = False
        self._waiting: dict[int, Waiting] = {}
        self._ranks: list[Identity] = []
        self._modules = Path()
        self._num_lost = 0
        self._not_before_s = 0.0
        self._has_told = False

    # ---- keeping them ready ----

    @property
    def wants_more(self) -> bool:
        """True if another standby should be started."""
        return (
            bool(self._ranks)
            and len(self._waiting) < self._size
            and self._check < 0
            and all(one.is_ready for one in self._waiting.values())
            and time.monotonic() >= self._not_before_s
        )

    def prepare_for(self, ranks: Sequence[Identity], modules: Path) -> None:
        """Set the ranks for which standbys are started; kill ready standbys that fit none of them.

        Args:
            ranks: the environment and the processors of each rank on this node.
            modules: the file with the names of the modules that these ranks have loaded.
        """
        self._ranks, self._modules = list(ranks), modules
        for one in list(self._waiting.values()):
            if one.is_ready and not any(one.fits(*rank) for rank in ranks):
                self._kill(one)

    def start_next(self) -> None:
        """Start the next standby. The first call starts a check of the interpreter instead."""
        if not self._size:
            return
        try:
            if self._is_checked:
                self._start_one()
            else:
                self._start_check()
        except (LaunchError, OSError) as err:
            self._lose(f"cannot start a standby: {err}")

    def _start_check(self) -> None:
        environ, _ = self._ranks[0]
        self._check = self._take_index()
        argv = (*self._program[:2], "-c", "raise SystemExit(1)")
        for pipe in self._guard.spawn(self._check, argv, check_environment(environ), _cwd()):
            os.close(pipe)

    def _start_one(self) -> None:
        environ, processors = min(self._ranks, key=self._num_for)
        index = self._take_index()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as unused:
            unused.callback(ours.close)
            pipes = self._guard.spawn(
                index,
                self._program,
                environment(environ, self._modules),
                _cwd(),
                processors,
                control=theirs.fileno(),
            )
            unused.pop_all()
        made = Waiting(index, environ, processors, ours, pipes, time.monotonic())
        self._waiting[index] = made
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(made))

    def _num_for(self, rank: Identity) -> int:
        """Return the number of standbys that were started for the given rank."""
        return sum(one.rank == rank[0].get("RANK") for one in self._waiting.values())

    def _take_index(self) -> int:
        self._next_index += 1
        return self._next_index

    def tick(self) -> None:
        """Raise the priority of slow standbys, and kill standbys that take too long to load."""
        now_s = time.monotonic()
        for one in list(self._waiting.values()):
            if one.is_ready or not one.pid:
                continue
            if now_s >= one.began_s + _LIMIT_S:
                self._kill(one)
                self._lose(f"a standby was not ready after {_LIMIT_S:g} s and was killed")
            elif now_s >= one.raise_at_s:
                one.raise_priority()

    # ---- what becomes of them ----

    def take(
        self, environ: Mapping[str, str], processors: Collection[int] | None
    ) -> Waiting | None:
        """Remove and return a standby that fits a rank; return None if no standby fits."""
        fitting = [one for one in self._waiting.values() if one.fits(environ, processors)]
        if not fitting:
            return None
        best = min(fitting, key=lambda one: one.rank != environ.get("RANK"))
        del self._waiting[best.index]
        self._selector.unregister(best.control)
        return best

    def take_news(self, news: Started | Failed | Exited) -> None:
        """Handle the guard's report on a standby, unless a rank has already taken the standby."""
        if news.index == self._check:
            if not isinstance(news, Started):
                self._note_check(news)
            return
        one = self._waiting.get(news.index)
        if one is None:
            return
        if isinstance(news, Started):
            one.pid = news.pid
            return
        self._drop(one)
        if isinstance(news, Failed):
            self._lose(f"a standby could not start: {news.error}")
        else:
            when = "while it waited" if one.is_ready else "while it loaded its libraries"
            self._lose(f"a standby {_how_it_ended(news.code)} {when}")

    def _note_check(self, news: Failed | Exited) -> None:
        self._check, self._is_checked = -1, True
        if isinstance(news, Failed):
            self._give_up(news.error)
        elif news.code != _IS_THERE:
            self._give_up(f"{self._program[0]} does not import sitecustomize from PYTHONPATH")

    def _hear(self, one: Waiting) -> None:
        if not one.hear():
            self._selector.unregister(one.control)
            self._guard.signal(one.index, signal.SIGKILL)  # its end is reported
            one.is_ready = False
            return
        if not one.is_ready:
            return
        if one.obstacle:
            self._give_up(one.obstacle)
            return
        ready = [one for one in self._waiting.values() if one.is_ready]
        if len(ready) == self._size and not self._has_told:
            self._has_told = True
            mib = max(one.private_bytes() for one in ready) / (1 << 20)
            are = "standby is" if self._size == 1 else "standbys are"
            each = "" if self._size == 1 else " each"
            self._say(f"{self._size} {are} ready; {mib:.0f} MiB of private memory{each}")

    def _lose(self, why: str) -> None:
        """Report a lost standby, and schedule its replacement."""
        self._num_lost += 1
        if self._num_lost >= _MAX_LOST:
            self._say(f"{why}; no more standbys after {_MAX_LOST} such failures")
            self._size = 0
            return
        pause_s = _FIRST_PAUSE_S * 2 ** (self._num_lost - 1)
        self._not_before_s = time.monotonic() + pause_s
        self._say(f"{why}; another one is started after {pause_s:g} s")

    def _give_up(self, why: str) -> None:
        self._say(f"--standby has no effect: {why}")
        self._size = 0
        for one in list(self._waiting.values()):
            self._kill(one)

    def _kill(self, one: Waiting) -> None:
        self._guard.signal(one.index, signal.SIGKILL)
        self._drop(one)

    def _drop(self, one: Waiting) -> None:
        del self._waiting[one.index]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one.control)
        one.close()

    def close(self) -> None:
        """Close the pipes and sockets of all standbys, which then exit."""
        for one in list(self._waiting.values()):
            self._drop(one)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _cwd() -> str:
    return os.getcwd()  # noqa: PTH109 -- a text is sent
