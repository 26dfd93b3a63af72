"""The C core that executes plain commands; without a compiler at installation there is none."""

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
    """A peer's `data_received`: executes plain commands itself, hands the rest on.

    Attributes:
        is_plain: whether the peer is a member between two commands, and reads. The owner keeps it:
            while it is False everything is handed on.
        is_ours: whether the peer may send tagged queries.
        write: the transport's.
        num_queued: the transport's `get_write_buffer_size`.
        may_be_queued: whether the transport was handed anything since it was seen empty. The
            owner sets it with each write of its own.
        descriptor: the socket's. Replies are sent there while the transport has nothing queued;
            what the kernel does not take, and every error, is left to it. -1: all is.
    """

    is_plain: bool
    is_ours: bool
    write: Callable[[bytes], None]
    num_queued: Callable[[], int]
    may_be_queued: bool
    descriptor: int

    def __call__(self, data: bytes, /) -> None:
        """Take received bytes."""


def available() -> bool:
    """Whether the C core was built."""
    return _native is not None


def make_executor(state: StoreState, limits: Limits) -> Executor | None:
    """Return what executes plain commands on `state`; None where the handlers execute all.

    It stops before the first command that needs more than plain keys, is cut in two or breaks a
    limit, and refuses nothing itself. It returns early once it has gathered 256 KiB of replies.
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
    """Return a peer's `data_received`, in front of its own, which takes what is not plain."""
    promised: dict[Hashable, bytes] = state.promised_to
    receiver: Receiver = _native.Receiver(executor=executor, promised=promised, receive=receive)
    return receiver
