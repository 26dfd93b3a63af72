"""Stop all training loops at the same step after any rank receives a signal or requests a stop.

    while step < steps:
        train()
        if dist.should_stop():              # every rank, once per step
            save(path, state)
            break

The signal handler only records the signal; the next call to `should_stop` publishes it (see
`agreement.py`). In a program that calls neither `should_stop` nor `stop_on_signals`, the signal
keeps its default action, which ends the process.

[Note: a stop request and a lost rank] Ranks that continue after the loss of a rank start a new
agreement for their new world, and count their calls from zero. Some of these ranks might not have
received an earlier stop request yet. Therefore, each rank repeats any request that it has received,
and all ranks stop at the same call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from echelon.dist import runtime
from echelon.dist.agreement.agreement import Agreement

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class _Stop:
    """This process's stop state: the signals that request a stop, and the current agreement."""

    def __init__(self, rank: int, agreement: Agreement) -> None:
        self.has_stopped = False
        self.has_signals = False  # chosen by the program, or by the first `should_stop`
        self.agreement = agreement
        self._wish = ""  # of this rank
        self._rank = rank
        self._before: dict[int, _Handler] = {}

    def handle(self, number: int) -> None:
        """Install the handler for a signal."""
        if number not in self._before:
            self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Restore the previous handlers for all signals."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def ask(self, reason: str) -> None:
        """Request a stop. This method can be called repeatedly, and from a signal handler."""
        self._wish = f"rank {self._rank}: {reason}"
        self.agreement.ask(self._wish)

    def reached(self) -> bool:
        """Count this call; return whether all ranks agreed to stop at this or an earlier call.

        If this process has left its groups but not yet joined a new world, return False without
        counting the call.
        """
        if self.agreement.is_closed:
            if runtime.is_between_worlds():
                return False
            self._renew()
        self.has_stopped = self.has_stopped or self.agreement.reached()
        return self.has_stopped

    def _renew(self) -> None:
        """Join the new world's agreement, and repeat any stop request from the previous world."""
        before = self.agreement
        known = before.reason if self.has_stopped else before.unanswered()
        self.agreement = runtime.agree_on_calls("stopping")
        self.has_stopped = False
        wish = known or self._wish  # a signal may be newer
        if wish:
            self.agreement.ask(wish)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if _current is not self:  # another thread has left the world, and could not restore this
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.has_stopped:
            self.ask(signal.Signals(number).name)


_current: _Stop | None = None


def stop_on_signals(*signals: int) -> None:
    """Stop all ranks when any rank receives one of these signals.

    The installed handlers replace the default action. Every rank must call this function on its
    main thread before it first calls `should_stop`. `shutdown` restores the previous handlers.

    Args:
        signals: the signals to handle; only SIGTERM if none are given. Some schedulers send a
            different signal as a warning (with Slurm, `--signal=USR1@120`).

    Raises:
        ValueError: this process does not belong to a world, or this is not the main thread.

    Example:
        >>> import signal
        >>> stop_on_signals(signal.SIGUSR1, signal.SIGTERM)
        >>> should_stop()
        False
    """
    stop = _need()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "signal handlers can be installed only on the main thread: call stop_on_signals there"
        )
    for number in signals or (signal.SIGTERM,):
        stop.handle(number)
    stop.has_signals = True


def should_stop() -> bool:
    """Return whether training should stop. The result becomes True at the same call on all ranks.

    Every rank must call this function once per step. The first call installs a handler for SIGTERM,
    unless `stop_on_signals` was called earlier. Calls do not communicate until a rank has received
    a signal or requested a stop. Once that rank has called `should_stop`, all ranks stop soon,
    usually within one step. If the ranks continue after the loss of a rank
    (`echelon.dist.resilient`), they agree on the stop again.

    Returns:
        True once the ranks have agreed to stop, after any of them received a signal or called
        `request_stop`.

    Raises:
        ValueError: this process does not belong to a world, or the first call was not made on the
            main thread.
        CollectiveTimeoutError: some ranks did not join the agreement within the world's timeout,
            for example because they never call `should_stop`; the error names them.
        PeerLostError: a rank died before the ranks reached agreement.
        StoreError: the job's store does not answer.

    Example:
        >>> for step in range(1000):
        ...     if step == 3:
        ...         request_stop("enough")  # or: kill -TERM one rank
        ...     if should_stop():
        ...         break
        >>> step < 10
        True
    """
    stop = _need()
    if not stop.has_signals:
        stop_on_signals()
    return stop.reached()


def request_stop(reason: str = "request_stop") -> None:
    """Ask all ranks to stop, so that `should_stop` soon returns True.

    Only one rank needs to call this function. It can be called from any thread.

    Raises:
        ValueError: this process does not belong to a world.

    Example:
        >>> request_stop("the validation loss rises")
        >>> while not should_stop():
        ...     pass  # train one step
        >>> stop_reason()
        'rank 0: the validation loss rises'
    """
    _need().ask(reason)


def stop_reason() -> str:
    """Return the reason for the stop, such as "rank 2: SIGTERM".

    The result is "" until `should_stop` has returned True.

    Example:
        >>> stop_reason()
        ''
        >>> request_stop("out of data")
        >>> while not should_stop():
        ...     pass  # train one step
        >>> stop_reason()
        'rank 0: out of data'
    """
    return _current.agreement.reason if _current is not None and _current.has_stopped else ""


def _need() -> _Stop:
    global _current
    if _current is None:
        _current = _Stop(runtime.own_rank(), runtime.agree_on_calls("stopping"))
    return _current


@runtime.before_shutdown
def _forget() -> None:
    global _current
    stop, _current = _current, None
    if stop is not None and threading.current_thread() is threading.main_thread():
        stop.restore()


def _forget_in_child() -> None:
    """Restore the handlers in a forked child, so that SIGTERM still ends data loader workers."""
    global _current
    stop, _current = _current, None
    if stop is not None:
        with contextlib.suppress(ValueError):  # handlers can be set on the main thread alone
            stop.restore()


os.register_at_fork(after_in_child=_forget_in_child)
