"""Wrap the optional C core, which executes plain commands.

A plain command reads or writes keys without affecting waiters, watches or leases.
"""

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
    """A peer's `data_received`, implemented in C.

    It executes plain commands itself and passes all other data to `receive`.

    Attributes:
        is_plain: whether plain commands can be executed now. The owner sets this attribute.
        is_ours: whether the peer is allowed to send tagged queries.
        write: the transport's `write`.
        num_queued: the transport's `get_write_buffer_size`.
        may_be_queued: whether the transport's buffer might contain data. The owner sets this
            attribute on each write.
        descriptor: the socket's file descriptor, to which replies can be written directly. If it is
            -1, the transport sends all replies.
    """

    is_plain: bool
    is_ours: bool
    write: Callable[[bytes], None]
    num_queued: Callable[[], int]
    may_be_queued: bool
    descriptor: int

    def __call__(self, data: bytes, /) -> None:
        """Process received bytes."""


def available() -> bool:
    """Return whether the C core was built."""
    return _native is not None


def make_executor(state: StoreState, limits: Limits) -> Executor | None:
    """Return an executor of plain commands on `state`, or None if the C core was not built.

    The executor stops before the first command that is not plain, is incomplete or exceeds a limit.
    It also stops when it has collected 256 KiB of replies.
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
    """Return a peer's `data_received`, implemented in C; see `Receiver`."""
    promised: dict[Hashable, bytes] = state.promised_to
    receiver: Receiver = _native.Receiver(executor=executor, promised=promised, receive=receive)
    return receiver
