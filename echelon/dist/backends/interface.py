"""The contract between a process group and the engines that carry out its operations.

An engine carries out checked operations of one group: it prepares, launches and polls. It does not
check arguments, number, record, or decide who is at fault; it keeps no flag for "broken", "aborted"
or "closed". All that is in `progress/group_state.py`, once, for every engine.

Order: collectives are carried out in the order in which they are handed over; sends and receives
run beside them and beside each other, in order per peer and tag.

Failure: an engine raises what it saw, and `GroupState` decides what it means.

| raised | meaning |
|---|---|
| an error of `errors.mismatch` | the engine compared calls, and they differ |
| an error of `errors.build` | the engine itself knows which ranks are late or gone |
| `EndedElsewhere` | the same, of another operation: the rank that lost it may know more |
| `ConnectionBroken` | a connection broke; the group finds out which rank is gone |
| `Refused` | all ranks refuse the operation alike; the group remains usable |
| whatever `watch.check()` raised | the group ended, or the operation's deadline passed |
| any other exception | this rank's own library failed; all ranks get its text and this rank |

A plug-in's factory is `create(members, store, timeout_s) -> Engine`; see `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from echelon.dist.operation.operation import Operation
from echelon.dist.options import Options
from echelon.errors import CollectiveError

CHECK_EVERY_S = 0.1  # the longest time between two calls of `Watch.check` in a wait loop


class ConnectionBroken(Exception):  # noqa: N818 -- not an error that a user sees
    """A connection of the engine broke, or another rank closed its end.

    Attributes:
        peer: group rank at the other end; None if the engine's library does not say.
    """

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class EndedElsewhere(Exception):  # noqa: N818 -- not an error that a user sees
    """Another rank's operation timed out, and that ended this one.

    Attributes:
        error: what is to be reported where that rank says nothing better.
    """

    def __init__(self, error: CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


class Refused(ValueError):  # noqa: N818 -- to a user it is a ValueError
    """All ranks' engines refused an operation, after it got its number: the group continues."""


def _keep_waiting() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """A group as its engine sees it.

    Attributes:
        name: the group's name, as errors show it.
        rank: this rank within the group.
        ranks: global ranks, in group order.
        options: what `init` was given.
        device: kind of device whose arrays are to be carried, if the caller knows: "cuda", "xpu",
            ...; "": the engine's own.
        device_index: this rank's device among its kind.
        address: this host's address as other hosts reach it; "" if the store does not say.
        check: raises `PeerLostError` if a member is known to have died while the group is being
            made; engines call it while they wait in their constructors.
    """

    name: str
    rank: int
    ranks: Sequence[int]
    options: Options = field(default_factory=Options)
    device: str = ""
    device_index: int = 0
    address: str = ""
    check: Callable[[], None] = _keep_waiting

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Watch(Protocol):
    """What bounds one operation. Given to the engine with it, by the group.

    Attributes:
        deadline_s: when the operation times out, on the monotonic clock; counted from the call.
    """

    deadline_s: float

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise what ends this operation: called in wait loops, at least every `CHECK_EVERY_S`.

        Does local work only, except after the deadline or a death: then it may take up to 2 s to
        find out which ranks are at fault. Safe on any thread.

        Args:
            needed: returns the group ranks without which the operation cannot end, if the engine
                knows them: only their deaths end it, and the timeout names them. None: all others.

        Raises:
            CollectiveTimeoutError: `deadline_s` has passed.
            PeerLostError: a needed rank has died.
            CollectiveError: the group was aborted, closed, or has failed in another operation.
        """


class Pending(Protocol):
    """An operation that was submitted."""

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or failure. Never blocks."""

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 while it has not."""

    @property
    def error(self) -> BaseException | None:
        """What it raised, as listed in this module; None if it succeeded or has not ended."""

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time is up; return whether it has ended.

        On a device: order the current stream behind it, and return True at once.
        """


class Engine(Protocol):
    """Carries out the operations of one group.

    Attributes:
        name: as users and verdicts name it.
        device: where its arrays are: "cpu", "cuda", "xpu".
        nests: whether a submitted operation can end while `execute` is suspended by a signal
            handler on the thread that called it. Without it, a collective that a handler calls
            during a collective of the same group is refused.

    The engine calls `watch.check()` for operations on the host, those that it runs on threads of
    its own included. For operations on a device the process's watcher thread does.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def device(self) -> str:
        """See above."""

    @property
    def nests(self) -> bool:
        """See above."""

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return why the engine cannot carry such operations; "" if it can. Local, no blocking."""

    def prepare(self, operation: Operation) -> None:
        """Check what `refuses` cannot see, such as the arrays' device index, before numbering.

        The operation's sequence is not final. Does no I/O.

        Raises:
            ValueError: the engine cannot carry this operation.
        """

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation on the caller's thread; block until its result is in place.

        A Python signal handler runs within `CHECK_EVERY_S`; what it raises is passed on.

        Raises:
            Exception: as listed in this module.
        """

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation and return at once. The caller keeps the arrays alive.

        Raises:
            Exception: as listed in this module; the operation was not started.
        """

    def batch(self) -> AbstractContextManager[object]:
        """Launch what this thread submits inside together, where the library can."""

    def cut(self, reason: CollectiveError | None) -> None:
        """End all local progress: everything that waits in the engine raises, on any thread.

        Called once, by the group: from a signal handler, from the watcher, or from the thread whose
        operation failed; possibly on the very thread that is inside `execute`. So it takes no lock
        that `execute` or `submit` may hold, does local work only (breaks connections, marks shared
        memory, aborts communicators), takes at most 1 s, and never asks the store.

        Args:
            reason: the group's first error; None if the group is closed in order. Engines over
                shared memory pass it on to the other ranks.
        """

    def close(self) -> None:
        """Release everything. Local work only, at most 1 s; safe to call twice.

        The group calls it after `cut`, once no thread is inside the engine.
        """
