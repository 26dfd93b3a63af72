"""Define the contract between a process group and the engines that carry out its operations.

An engine carries out the operations of one group after they have been checked: it prepares,
launches and polls them. An engine does not check arguments, assign operation numbers, record
operations, decide which rank is at fault, or store whether the group is broken, aborted or closed.
`progress/group_state.py` performs these tasks for every engine.

Order: collectives run in the order in which they are submitted. Messages run concurrently with
collectives, and in order for each peer and tag.

Failure: an engine raises an exception for what it observed, and `GroupState` interprets the
exception.

| raised | meaning |
|---|---|
| an error from `errors.mismatch` | the engine compared the ranks' calls, and they differ |
| an error from `errors.build` | the engine itself determined which ranks are late or dead |
| `EndedElsewhere` | another rank's operation ended this one; its error can be more precise |
| `ConnectionBroken` | a connection broke; the group determines which rank is dead |
| `Refused` | all ranks refuse the operation in the same way; the group remains usable |
| an exception from `watch.check()` | the group ended, or the operation's deadline passed |
| any other exception | a library failed on this rank; all ranks report the error |

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
    """Raised when one of the engine's connections breaks or is closed by the rank at the other end.

    Attributes:
        peer: the group rank at the other end; None if the engine's library does not report it.
    """

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class EndedElsewhere(Exception):  # noqa: N818 -- not an error that a user sees
    """Raised when an operation ends because an operation on another rank timed out.

    Attributes:
        error: the error to report, unless the other rank reports a more precise error.
    """

    def __init__(self, error: CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


class Refused(ValueError):  # noqa: N818 -- to a user it is a ValueError
    """Raised when all ranks' engines refuse an operation that already has a sequence number.

    The group remains usable.
    """


def _keep_waiting() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The members and settings of the group for which an engine is created.

    Attributes:
        name: the group's name in error messages.
        rank: this process's rank within the group.
        ranks: the members' global ranks, in group order.
        options: the options passed to `init`.
        device: the kind of device whose arrays the engine must transfer, such as "cuda" or "xpu";
            "" means the engine's own kind.
        device_index: the index of this rank's device among the devices of that kind.
        address: the address at which other hosts reach this host; "" if the store does not provide
            it.
        check: a function that raises `PeerLostError` if a member is known to have died. Engines
            call it while they wait in their constructors.
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
        """The number of members."""
        return len(self.ranks)


class Watch(Protocol):
    """The limits that apply to one operation.

    Attributes:
        deadline_s: the monotonic time at which the operation times out, in seconds. The timeout is
            counted from the user's call.
    """

    deadline_s: float

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise an error if this operation must be aborted.

        Engines call this at least every `CHECK_EVERY_S` seconds while they wait.

        The check is local and fast. After the deadline or the death of a rank, the check can take
        up to 2 s to determine the ranks at fault. Safe on any thread.

        Args:
            needed: a function that returns the group ranks that the operation still needs; None
                means all other ranks. A timeout error names these ranks. If any other rank dies,
                the operation continues.

        Raises:
            CollectiveTimeoutError: `deadline_s` has passed.
            PeerLostError: a rank that the operation still needs has died.
            CollectiveError: the group was aborted or closed, or another of its operations failed.
        """


class Pending(Protocol):
    """An operation that has been submitted and might still be running."""

    @property
    def done(self) -> bool:
        """True once the operation has succeeded or failed. Never blocks."""

    @property
    def ended_mono_ns(self) -> int:
        """The monotonic time when the operation ended, in nanoseconds; 0 while it is running."""

    @property
    def error(self) -> BaseException | None:
        """The error that the operation raised, or None.

        The table at the top of this module lists the possible errors.
        """

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the operation ends or the timeout expires; return whether it has ended.

        For a device operation, make the current stream wait for the operation and return True
        immediately.
        """


class Engine(Protocol):
    """An engine that carries out the operations of one group.

    Attributes:
        name: the backend's name, as shown to users.
        device: the kind of device whose arrays the engine transfers: "cpu", "cuda" or "xpu".
        nests: whether a signal handler that interrupts a collective is allowed to call another
            collective of the same group.

    For operations on the host, the engine calls `watch.check()`. For operations on a device, the
    process's watcher thread calls it.
    """

    @property
    def name(self) -> str:
        """The name of the backend."""

    @property
    def device(self) -> str:
        """The kind of device whose arrays the engine transfers."""

    @property
    def nests(self) -> bool:
        """True if a signal handler can run a collective while another collective is in progress."""

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return the reason the engine refuses a kind of operation, or "" if it accepts it.

        Never blocks.
        """

    def prepare(self, operation: Operation) -> None:
        """Check conditions that `refuses` cannot check, such as the device index of the arrays.

        The method is called before the operation gets its final sequence number, and does no I/O.

        Raises:
            ValueError: the engine cannot carry out this operation.
        """

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation on the caller's thread; block until its result has been written.

        Python signal handlers run within `CHECK_EVERY_S` seconds. Their exceptions are propagated.

        Raises:
            Exception: any error in the table at the top of this module.
        """

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation and return immediately. The caller must keep the arrays alive.

        Raises:
            Exception: the operation could not be started. The table at the top of this module lists
                the possible errors.
        """

    def batch(self) -> AbstractContextManager[object]:
        """Return a context manager that batches operations, if the library supports batching."""

    def cut(self, reason: CollectiveError | None) -> None:
        """Abort all local work: every wait in the engine, on any thread, raises an error.

        The group calls this method once, from a signal handler or on any thread, possibly during
        `execute`. The method must therefore not take a lock that `execute` or `submit` might hold.
        It must finish within 1 s and do only local work, such as breaking connections or aborting
        communicators.

        Args:
            reason: the group's first error, or None for a normal close. Engines over shared memory
                pass the reason on to the other ranks.
        """

    def close(self) -> None:
        """Release all resources within 1 s. Safe to call twice.

        The group calls this method after `cut`, when no thread is inside the engine.
        """
