"""Provide independent, ordered connections between two ranks.

Each channel is identified by a negative tag, which user messages cannot have. The two ends agree on
the tag through the store, so neither end has to wait for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from echelon.dist.calls.base import Timeout
from echelon.dist.operation.arrays import Array, view
from echelon.dist.operation.operation import OPEN
from echelon.dist.work import Work
from echelon.store.base import Store

_FIRST_TAG = -16  # those above are left to engines
_LAST_TAG = -(1 << 31)


class ChannelTags:
    """The allocator of one group's channel tags."""

    def __init__(self, store: Store, rank: int) -> None:
        """Allocate tags through `store`, a view of the store reserved for the group's channels."""
        self._store = store
        self._rank = rank
        self._known: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    def tag(self, peer: int, name: str) -> int:
        """Return a channel's tag, which is the same at both ends.

        Raises:
            StoreError: the store does not respond.
        """
        with self._lock:
            tag = self._known.get((peer, name))
            if tag is None:
                low, high = sorted((self._rank, peer))
                mine = str(_FIRST_TAG + 1 - self._store.add("num", 1))
                tag = int(self._store.compare_set(f"{low}-{high}/{name}", "", mine))
                assert _LAST_TAG <= tag <= _FIRST_TAG, tag
                self._known[peer, name] = tag
            return tag


class Channel:
    """One end of a channel to another rank. Use `ProcessGroup.channel` to create it.

    Host arrays and device arrays are ordered separately: in each direction, the arrays of one kind
    arrive in the order in which they were sent. A message that is not received never blocks
    collectives, messages with other tags, or other channels.

    Attributes:
        peer: the group rank of the other end.
        name: the channel's name.
    """

    def __init__(self, peer: int, name: str, tag: int, message: Callable[..., Work | None]) -> None:
        self.peer = peer
        self.name = name
        self._tag = tag
        self._message = message

    def __repr__(self) -> str:
        return f"Channel({self.name!r} to group rank {self.peer})"

    def open(self, like: Array, async_op: bool = False, timeout_s: Timeout = None) -> Work | None:
        """Connect both directions before the first message, for arrays on the device of `like`.

        The method blocks until the other end opens the channel or uses it in both directions, or
        until the timeout expires. A rank with several channels should open all of them with
        `async_op` before it waits for any of them. If `like` is a host array, the method returns
        immediately. If `open` is not called, the first message in each direction connects that
        direction.

        Args:
            like: an array on the device; it is neither read nor written.
            async_op: whether to return a `Work` immediately instead of blocking.
            timeout_s: the timeout for this call; None means the group's timeout.

        Raises:
            ValueError: the group has not yet made a collective call on the device, or has too many
                tags and channels on that device.
        """
        data = view(like, "like", writable=False)
        return self._message(
            OPEN, self.peer, data, self._tag, timeout_s=timeout_s, async_op=async_op
        )

    def send(self, x: Array, async_op: bool = False, timeout_s: Timeout = None) -> Work | None:
        """Send `x` to the other end, which must receive it with the same dtype and size.

        The call can return before the other end has called `recv`. The caller must not modify `x`
        until the call returns or, with `async_op`, until `Work.wait` returns.

        Args:
            x: an array of any shape.
            async_op: whether to return a `Work` immediately instead of blocking.
            timeout_s: the timeout for this operation; None means the group's timeout.
        """
        data = view(x, "x", writable=False)
        return self._message(
            "send", self.peer, data, self._tag, timeout_s=timeout_s, async_op=async_op
        )

    def recv(self, x: Array, async_op: bool = False, timeout_s: Timeout = None) -> Work | None:
        """Receive the next message from the other end into `x`.

        Args:
            x: an array of any shape. Its dtype and number of elements must match those of the array
                sent.
            async_op: whether to return a `Work` immediately instead of blocking.
            timeout_s: the timeout for this operation; None means the group's timeout.
        """
        data = view(x, "x", writable=True)
        return self._message(
            "recv", self.peer, data, self._tag, timeout_s=timeout_s, async_op=async_op
        )
