"""Lanes: those of one group on a device, which one a message takes, and how they are opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from echelon.dist.backends.device.clock import DeviceClock
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.pairs import Lane, Way
from echelon.dist.operation.operation import OPEN, Operation
from echelon.store import PrefixStore

MAX_LANES = 256  # of a group on a rank: each has a communicator, with buffers on the device


class Lanes:
    """The lanes of one group on one device, made as they are needed.

    Args:
        library: whose communicators carry the messages.
        rank: this one's rank in the group.
        name: the group's name, for errors.
        index: this rank's device.
        store: where the two ends of a lane meet.
        clock: of the device.
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
        """Return the lanes of a message: the one that it takes, or both if it opens them."""
        mine, peer, name = self._rank, operation.peer, f"tag/{operation.tag}"
        out, back = Way(mine, peer, name), Way(peer, mine, name)
        if operation.kind == OPEN:
            return [out, back]
        return [out if operation.kind == "send" else back]

    def prepare(self, operation: Operation) -> None:
        """Check that there may be another lane, if the message needs one.

        Raises:
            ValueError: there are too many.
        """
        num_new = sum(way not in self._lanes for way in self.ways(operation))
        if num_new and len(self._lanes) + num_new > MAX_LANES:
            raise ValueError(
                f"more than {MAX_LANES} tags and channels on {self._library.device} in group "
                f"{self._name!r}: each has a communicator; use fewer"
            )

    def lane(self, way: Way) -> Lane:
        """Return a lane; it is made by its first message."""
        with self._lock:
            lane = self._lanes.get(way)
            if lane is None:
                lane = self._lanes[way] = Lane(
                    self._library, way, self._rank, self._index, self._store, self._clock
                )
            return lane

    def of(self, operation: Operation) -> list[Lane]:
        """Return the lanes of a message."""
        return [self.lane(way) for way in self.ways(operation)]

    def all(self) -> list[Lane]:
        """Return the lanes that were made."""
        return list(self._lanes.values())


class Opening:
    """Lanes that are being connected: the engine's handle of an `open`."""

    is_detached = False

    def __init__(self, lanes: Sequence[Lane], check: Callable[[], None]) -> None:
        """Begin to connect; never blocks."""
        self._num_left = len(lanes)
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._ended_mono_ns = 0
        self._error: BaseException | None = None
        for lane in lanes:
            lane.open(self._opened, check)

    def _opened(self, error: BaseException | None) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if error is not None:
            self.fail(error)
        elif is_last:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Note how it failed; the first error stays."""
        if not self._has_ended.is_set():
            self._error = self._error or error
            self._end()

    def _end(self) -> None:
        self._ended_mono_ns = self._ended_mono_ns or time.monotonic_ns()
        self._has_ended.set()

    @property
    def done(self) -> bool:
        """Whether all lanes are connected, or one failed."""
        return self._has_ended.is_set()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.done

    @property
    def is_at_rest(self) -> bool:
        """Whether the library does nothing for it any more."""
        return self._num_left == 0

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 while it has not."""
        return self._ended_mono_ns

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time is up; return whether it has ended."""
        return self._has_ended.wait(timeout_s)
