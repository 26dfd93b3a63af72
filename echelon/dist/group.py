"""Define `ProcessGroup`, whose array operations are in `calls/`."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, overload

import echelon.recorder.current as black_box
from echelon.dist import objects
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.calls.base import Timeout
from echelon.dist.calls.collectives import Collectives
from echelon.dist.calls.point_to_point import PointToPoint
from echelon.dist.channel import Channel, ChannelTags
from echelon.dist.operation.checks import check_timeout
from echelon.dist.progress.evidence import Evidence
from echelon.dist.progress.group_state import GroupState
from echelon.dist.work import Work

MakeGroup = Callable[[Sequence[int], str, str], "ProcessGroup | None"]


class ProcessGroup(Collectives, PointToPoint):
    """A set of ranks that communicate. Use `init`, `new_group` or `split` to create a group.

    All operations except `send` and `recv` are collective: all members must make the same calls in
    the same order. Arrays can be NumPy arrays, torch tensors, CuPy arrays or other DLPack arrays,
    and must be contiguous. Results are written in place. `root`, `to` and `source` are ranks within
    the group. Calls raise:

    * ValueError, before anything is sent, if an argument is not supported;
    * CollectiveMismatchError, on every rank, if members made different calls;
    * CollectiveTimeoutError, if some members did not make the call within `timeout_s` (None means
      the group's timeout);
    * PeerLostError, if a member died or left.

    After any of the last three errors, the group can no longer be used, and later calls raise an
    error that mentions the first error. Several threads can make calls at the same time, but the
    order of the calls must be the same on all ranks. With `async_op=True`, a call returns a `Work`
    immediately, and `Work.wait` raises the errors.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> values = np.full(4, world.rank + 1.0, np.float32)
        >>> world.all_reduce(values)
        >>> values
        array([3., 3., 3., 3.], dtype=float32)
    """

    def __init__(
        self,
        members: Members,
        engine: Engine,
        timeout_s: float,
        make_group: MakeGroup,
        evidence: Evidence | None = None,
        channels: ChannelTags | None = None,
    ) -> None:
        super().__init__(members, engine, timeout_s, evidence)
        self._make_group = make_group
        self.created_mono_ns = time.monotonic_ns()
        self._num_splits = 0
        self._channels = channels

    # ---- who we are ----

    @property
    def backend(self) -> str:
        """The name of the group's backend."""
        return self._engine.name

    @property
    def timeout_s(self) -> float:
        """The timeout of this group's operations, in seconds."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float | timedelta) -> None:
        self._timeout_s = check_timeout(timeout_s)

    @property
    def num_collectives(self) -> int:
        """The number of collectives that this rank has called on the group so far."""
        return self._state.num_collectives

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name!r}, rank {self.rank} of {self.size}, {self.backend})"

    # ---- objects ----

    def broadcast_object(self, obj: Any, root: int, timeout_s: Timeout = None) -> Any:
        """Return `root`'s object on every rank. The object must be plain data.

        Plain data is None, bool, numbers, str, bytes, lists and dicts; a tuple arrives as a list.
        The method blocks until the root has called it.

        Args:
            obj: the object to send on `root`; ignored on other ranks.
            root: a rank within this group.
            timeout_s: the timeout for each of the call's two collectives; None means the group's
                timeout.

        Raises:
            TypeError: the object holds a value of another type.
            ValueError: the method was called inside `coalesce()`.
        """
        root = self._check_object_call("broadcast_object", root)
        data = objects.encode(obj) if self.rank == root else None
        return objects.broadcast(self, data, root, timeout_s)

    def all_gather_object(self, obj: Any, timeout_s: Timeout = None) -> list[Any]:
        """Return all ranks' objects, in rank order, on every rank.

        See `broadcast_object` for the supported objects and the errors.
        """
        self._check_object_call("all_gather_object")
        return objects.all_gather(self, objects.encode(obj), timeout_s)

    def gather_object(self, obj: Any, root: int, timeout_s: Timeout = None) -> list[Any] | None:
        """Return all ranks' objects on `root`, in rank order; return None on other ranks.

        See `broadcast_object` for the supported objects and the errors.
        """
        root = self._check_object_call("gather_object", root)
        return objects.gather(self, objects.encode(obj), root, timeout_s)

    def scatter_object(
        self, objs: Sequence[Any] | None, root: int, timeout_s: Timeout = None
    ) -> Any:
        """Return this rank's object from the list that `root` passes.

        See `broadcast_object` for the supported objects and the errors.

        Args:
            objs: on `root`, one object per rank in rank order; ignored on other ranks.
            root: a rank within this group.
            timeout_s: the timeout for each of the call's two collectives; None means the group's
                timeout.
        """
        root = self._check_object_call("scatter_object", root)
        parts = None
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                raise ValueError(
                    f"scatter_object: root {root} must pass one object per rank ({self.size}), got "
                    f"{'None' if objs is None else len(objs)}"
                )
            parts = [objects.encode(obj) for obj in objs]
        return objects.scatter(self, parts, root, timeout_s)

    # ---- several at once ----

    @contextlib.contextmanager
    def coalesce(self) -> Iterator[None]:
        """Launch the operations called inside the block together, and wait for all of them.

        If the block raises an exception, none of its device operations are launched. If the block
        had already called a device operation, the group fails, because other ranks might have
        launched theirs.

        Raises:
            ValueError: the method was called inside another `coalesce()` block.
        """
        if self._batch() is not None:
            raise ValueError("coalesce() cannot be nested")
        recorder = black_box.current()
        number = -1 if recorder is None else recorder.next_coalesced()
        works: list[Work] = []
        self._coalesced.batch = (number, works)
        try:
            with self._engine.batch():
                yield
        except BaseException:
            self._state.sweep()  # what was called and not launched ends the group, at once
            raise
        finally:
            self._coalesced.batch = None
        for work in works:
            work.wait()

    @overload
    def split(self, color: int, key: int = ..., name: str | None = ...) -> ProcessGroup: ...

    @overload
    def split(
        self, color: int | None, key: int = ..., name: str | None = ...
    ) -> ProcessGroup | None: ...

    def split(
        self, color: int | None, key: int = 0, name: str | None = None
    ) -> ProcessGroup | None:
        """Split the group; ranks with equal `color` form a new group.

        The new group's members are ordered by `key`, and those with equal `key` by their old rank.
        Every member must call this method, and each call blocks until the other members have
        called it. The method returns this rank's new group, or None if `color` is None.

        Raises:
            TypeError: `color` or `key` is not an integer.
            ValueError: the method was called inside `coalesce()`.
        """
        self._check_object_call("split")
        color, key = None if color is None else operator.index(color), operator.index(key)
        color = color if color is None else int(color)  # True and 1 are one color
        number = self._num_splits
        self._num_splits += 1
        chosen = self.all_gather_object([color, key])
        if color is None:
            return None
        alike = [rank for rank in range(self.size) if chosen[rank][0] == color]
        alike.sort(key=lambda rank: (chosen[rank][1], rank))
        ranks = [self.ranks[rank] for rank in alike]
        title = name or f"{self.name}/{color}"
        return self._make_group(ranks, title, f"split/{number}/{color}")

    def channel(self, peer: int, name: str) -> Channel:
        """Return an independent, ordered channel to another rank.

        Both ends must call this method, but neither end waits for the other end. The first use of a
        name accesses the store. The same name always refers to the same channel. A channel carries
        both host and device arrays; `Channel.open` prepares it for a device.

        Args:
            peer: the rank within this group at the other end.
            name: a non-empty string. The other end must use the same name.

        Raises:
            ValueError: `peer` is not a rank of the group or is this rank, the name is empty, or the
                group has no store.
            StoreError: the store does not respond.
        """
        peer = self._check_peer(peer, "peer")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a channel needs a name, got {name!r}")
        if self._channels is None:
            raise ValueError(f"group {self.name!r} does not have a store, which channels need")
        return Channel(peer, name, self._channels.tag(peer, name), self._message)

    # ---- the end ----

    def abort(self) -> None:
        """End the group on all ranks; waiting operations raise CollectiveError.

        The method can be called on any thread and in a signal handler. It returns within 1 s and
        does not wait for other ranks.
        """
        if not self._state.is_closed and not self._state.is_foreign:
            self._state.abort()

    def close(self) -> None:
        """End the group on this rank and release its resources. Calling this twice is safe.

        The method takes at most 1 s and does not contact other ranks. Operations on other ranks
        that still need this rank raise PeerLostError. If a signal handler closes the group during
        one of the group's calls, the interrupted call raises CollectiveError.
        """
        self._state.close()

    @property
    def state(self) -> GroupState:
        """The state of the group and of this rank's operations on it."""
        return self._state

    def _check_object_call(self, call: str, root: int = 0) -> int:
        if self._batch() is not None:
            raise ValueError(
                f"{call} cannot be called inside coalesce(): its second step needs the result of "
                "its first"
            )
        return self._check_rank(root, "root")
