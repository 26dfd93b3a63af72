"""Manage the lanes (see `pairs.py`) of one group on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from echelon.dist.backends.device.clock import DeviceClock
from echelon.dist.backends.device.communicators.pairs import Lane, Way
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.operation.operation import OPEN, Operation
from echelon.dist.progress.outcome import Outcome
from echelon.store import PrefixStore

MAX_LANES = 256  # of a group on a rank: each has a communicator, with buffers on the device


class Lanes:
    """The lanes of one group on one device. Lanes are created on demand.

    Args:
        library: the library whose communicators carry the messages.
        rank: this process's rank in the group.
        name: the group's name, for error messages.
        index: the index of this rank's device.
        store: the store through which the two ends of a lane find each other.
        clock: the clock of the device.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        rank: int,
        name: str,
        index: int,
        store: PrefixStore,
        clock: DeviceClock,
    ) -> None:
        self._library = library
        self._rank = rank
        self._name = name
        self._index = index
        self._store = store
        self._clock = clock
        self._lanes: dict[Way, Lane] = {}
        self._lock = threading.Lock()

    def ways(self, operation: Operation) -> list[Way]:
        """Return the direction of a send or receive, or both directions for an `open`."""
        mine, peer, name = self._rank, operation.peer, f"tag/{operation.tag}"
        out, back = Way(mine, peer, name), Way(peer, mine, name)
        if operation.kind == OPEN:
            return [out, back]
        return [out if operation.kind == "send" else back]

    def prepare(self, operation: Operation) -> None:
        """Check that the lanes for a message exist or can be created.

        Raises:
            ValueError: the maximum number of lanes has been reached.
        """
        num_new = sum(way not in self._lanes for way in self.ways(operation))
        if num_new and len(self._lanes) + num_new > MAX_LANES:
            raise ValueError(
                f"group {self._name!r} uses more than {MAX_LANES} tags and channels on "
                f"{self._library.device}: use fewer, because each needs its own communicator"
            )

    def lane(self, way: Way) -> Lane:
        """Return the lane for a direction; create the lane if necessary."""
        with self._lock:
            lane = self._lanes.get(way)
            if lane is None:
                lane = self._lanes[way] = Lane(
                    self._library, way, self._rank, self._index, self._store, self._clock
                )
            return lane

    def of(self, operation: Operation) -> list[Lane]:
        """Return the lanes that an operation uses, creating any that are missing."""
        return [self.lane(way) for way in self.ways(operation)]

    def all(self) -> list[Lane]:
        """Return all lanes that exist."""
        return list(self._lanes.values())


class Opening(Outcome):
    """The engine's handle for an `open` operation, which connects one or both lanes of a pair."""

    is_detached = False

    def __init__(self, lanes: Sequence[Lane], check: Callable[[], None]) -> None:
        """Start connecting the lanes without blocking."""
        super().__init__()
        self._num_left = len(lanes)
        self._lock = threading.Lock()
        for lane in lanes:
            lane.open(self._opened, check)

    def _opened(self, error: BaseException | None) -> None:
        with self._lock:
            self._num_left -= 1
            if error is not None or self._num_left == 0:
                self.finish(error)  # one at a time, or a success could hide another's error

    def fail(self, error: BaseException) -> None:
        """Record that the operation failed."""
        self.finish(error)

    @property
    def is_over(self) -> bool:
        """True once the operation has ended."""
        return self.done

    @property
    def is_at_rest(self) -> bool:
        """True once the library has finished all work for the operation."""
        return self._num_left == 0
