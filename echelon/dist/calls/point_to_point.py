"""Define send and receive. Each call checks its arguments and starts one operation."""

from __future__ import annotations

from typing import Literal, overload

from echelon.dist.calls.base import Calls, Timeout
from echelon.dist.operation.arrays import Array, view
from echelon.dist.operation.checks import check_tag
from echelon.dist.operation.operation import ANY_SOURCE
from echelon.dist.work import Work


class PointToPoint(Calls):
    """The calls that involve only two members of the group."""

    @overload
    def send(
        self,
        x: Array,
        to: int,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> None: ...

    @overload
    def send(
        self,
        x: Array,
        to: int,
        tag: int = ...,
        *,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def send(
        self, x: Array, to: int, tag: int = ..., async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def send(
        self, x: Array, to: int, tag: int = 0, async_op: bool = False, timeout_s: Timeout = None
    ) -> Work | None:
        """Send `x` to a rank, which must receive it with the same tag, dtype and size.

        The call can return before the receiver has called `recv`. Once the operation has ended, it
        is safe to modify `x`. Messages that one rank sends to another with the same tag arrive in
        order.

        Args:
            x: any shape.
            to: the receiver's rank within this group; must not be this rank.
            tag: a number from 0 to 2^31 - 3; the receiver must pass the same tag.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        to = self._check_peer(to, "to")
        source = view(x, "x", writable=False)
        return self._message(
            "send", to, source, check_tag(tag), timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def recv(
        self,
        x: Array,
        source: int | None = ...,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> int: ...

    @overload
    def recv(
        self,
        x: Array,
        source: int | None = ...,
        tag: int = ...,
        *,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def recv(
        self,
        x: Array,
        source: int | None = ...,
        tag: int = ...,
        async_op: bool = ...,
        timeout_s: Timeout = ...,
    ) -> Work | int: ...

    def recv(
        self,
        x: Array,
        source: int | None = None,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: Timeout = None,
    ) -> Work | int:
        """Receive the next message with this tag from a rank into `x`.

        Args:
            x: any shape; its dtype and number of elements must match the sender's.
            source: the sender's rank within this group; None accepts the first message with the tag
                from any rank.
            tag: the sender's tag.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.

        Returns:
            The sender's rank within this group; if asynchronous, a `Work` whose `source` is that
            rank.
        """
        peer = ANY_SOURCE if source is None else self._check_peer(source, "source")
        target = view(x, "x", writable=True)
        work = self._message(
            "recv", peer, target, check_tag(tag), timeout_s=timeout_s, async_op=async_op
        )
        if work is None:
            return peer
        return work if async_op else work.source
