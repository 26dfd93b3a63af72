"""Wrap the C core that executes plain commands, if it could be compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from echelon.store.state.state import StoreState
from echelon.store.wire.limits import Limits

try:
    _native: Any = importlib.import_module("echelon.store.server._native")
except ImportError:
    _native = None

# Called with the received bytes, where to begin, and whether the peer is echelon's. Returns where
# it stopped and the replies to what it executed.
Executor = Callable[[bytes, int, bool], tuple[int, bytes]]


class Receiver(Protocol):
    """A peer's `data_received` in C, which executes plain commands and passes on all other data.

    Attributes:
        is_plain: whether the peer is a member, is between two commands, and reads its replies. The
            owner sets this; while it is False, everything is passed on.
        is_ours: whether the peer may send tagged queries.
        write: the transport's `write`.
        num_queued: the transport's `get_write_buffer_size`.
        may_be_queued: whether anything was written to the transport since it was last seen empty.
            The owner sets this on each of its own writes.
        descriptor: the socket's file descriptor. Replies are sent to it directly while the
            transport has nothing queued; the transport gets what the kernel does not accept, and
            handles every error. If this is -1, the transport sends everything.
    """

    is_plain: bool
    is_ours: bool
    write: Callable[[bytes], None]
    num_queued: Callable[[], int]
    may_be_queued: bool
    descriptor: int

    def __call__(self, data: bytes, /) -> None:
        """Process bytes that were received."""


def available() -> bool:
    """Whether the C core was built."""
    return _native is not None


def make_executor(state: StoreState, limits: Limits) -> Executor | None:
    """Return an executor of plain commands on `state`, or None without the C core.

    The executor stops before the first command that needs more than plain keys, is incomplete or
    exceeds a limit, and never refuses a command itself. It returns early once it has collected 256
    KiB of replies.
    """
    if _native is None:
        return None
    executor: Executor = _native.Executor(
        values=state.values,
        queues=state.queues,
        waiting=state.waiting,
        present_by=state.present_by,
        watched=state.watched,
        key_bytes=limits.key_bytes,
        value_bytes=limits.value_bytes,
        num_keys=limits.num_keys,
    )
    return executor


def make_receiver(
    executor: Executor, state: StoreState, receive: Callable[[bytes], None]
) -> Receiver:
    """Return a native `data_received` that executes plain commands and passes on all other data."""
    promised: dict[Hashable, bytes] = state.promised_to
    receiver: Receiver = _native.Receiver(executor=executor, promised=promised, receive=receive)
    return receiver
