"""What every store offers: torch's Store API, and gather.

`Store` checks arguments, turns text into bytes, gives every call a deadline, and tells the observer
about calls that may wait for others; a store implements the `_do_*` primitives below it. Where a
store has no gather or barrier of its own, both are built here of plain operations.

[Note: a round of plain operations] Each rank counts its own uses of a key with `add`, which numbers
the rounds; it writes its value under key/round/rank and waits for all of them; the last one to
have read deletes the round. Five round trips, any number of rounds, and a rank that gives up
takes its value and its count back. What this cannot do without a server's help: notice that a
rank died after it arrived, or decide between a timeout and the last arrival when both happen at
once.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from echelon.errors import StoreError, StoreTimeoutError

if TYPE_CHECKING:
    from typing_extensions import Self

Observer = Callable[[str, str], AbstractContextManager[object]]
Timeout = float | timedelta

DEFAULT_TIMEOUT_S: Final = 300.0
MAX_KEY_BYTES: Final = 8191  # one less than the protocol's, for the "/" that travels with a key
MAX_VALUE_BYTES: Final = 8 << 20

_UNOBSERVED: Final = contextlib.nullcontext()


def seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds.

    Raises:
        ValueError: it is not positive.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value > 0:
        raise ValueError(f"timeout must be positive, got {timeout!r}")
    return value


class Deadline:
    """A point in time by which a call must be done.

    Attributes:
        timeout_s: how long it was when it was made.
        at: `time.monotonic()` at which it passes.
    """

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until it passes, at least 0."""
        return max(0.0, self.at - time.monotonic())


class Store(ABC):
    """Keys, counters, queues, barriers and gathers that several processes share.

    Values are bytes; text is taken as UTF-8. Every call is bounded by a timeout: its own, else
    the store's. Calls may come from several threads.

    All calls raise:
        StoreTimeoutError: the timeout passed; `.missing` has the keys or ranks that did not come.
        StoreConnectionError: the server cannot be reached, or left.
        StoreError: the store holds something with which the operation makes no sense.
        ValueError, TypeError: the arguments make no sense.
    """

    _observer: Observer | None = None
    _timeout_s: float = DEFAULT_TIMEOUT_S

    # Settings.

    @property
    def observer(self) -> Observer | None:
        """Called as `observer(operation, key)` around each call that may wait for others."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer

    @property
    def timeout(self) -> timedelta:
        """How long a call may take that names no timeout of its own."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of calls that name none."""
        self._timeout_s = seconds(timeout)

    @property
    def endpoint(self) -> str:
        """Where the store is, for messages."""
        return type(self).__name__

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set work: always."""
        return True

    @abstractmethod
    def clone(self) -> Store:
        """Return another store on the same keys, with a connection of its own."""

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to free
        """Free what the store holds; further calls fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Keys.

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._do_set(_key(key), _value(value))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of a key; waits until it has one."""
        raw = _key(key)
        with self._observed("get", key):
            return self._do_get(raw, self._deadline(timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter (0 when missing) and return the new value."""
        return self._do_add(_key(key), _int64(amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key, which may be missing."""
        self._do_append(_key(key), _value(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys are there; waits for nobody."""
        return self._do_check(_keys(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the key holds `expected`, or is missing and that is empty.

        Returns what the key holds afterwards; `expected` if it is missing and was not stored.
        """
        return self._do_compare_set(_key(key), _value(expected), _value(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key and the queue of that name; say whether either was there."""
        return self._do_delete(_key(key))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all keys have a value, or a queue of that name an item."""
        raw = _keys(keys)
        if raw:
            with self._observed("wait", keys[0]):
                self._do_wait(raw, self._deadline(timeout))

    def num_keys(self) -> int:
        """Return how many keys the store has."""
        return self._do_num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys, in no order."""
        return [key.decode("utf-8", "surrogateescape") for key in self._do_list_keys()]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of several keys; waits until all have one."""
        raw = _keys(keys)
        if not raw:
            return []
        with self._observed("multi_get", keys[0]):
            return self._do_multi_get(raw, self._deadline(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values at once."""
        raw = _keys(keys)
        if len(raw) != len(values):
            raise ValueError(f"multi_set of {len(raw)} keys and {len(values)} values")
        if raw:
            self._do_multi_set(raw, [_value(value) for value in values])

    # Queues.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        self._do_queue_push(_key(key), _value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Take the oldest item of a queue; waits for one unless `block` is False.

        Raises:
            StoreError: the queue is empty and `block` is False.
        """
        raw = _key(key)
        if block:
            with self._observed("queue_pop", key):
                return self._do_queue_pop_wait(raw, self._deadline(timeout))
        item = self._do_queue_pop(raw)
        if item is None:
            raise StoreError(
                f"queue_pop({key!r}, block=False) on {self.endpoint}: the queue is empty",
                key=key,
                endpoint=self.endpoint,
            )
        return item

    def queue_len(self, key: str) -> int:
        """Return how many items a queue holds."""
        return self._do_queue_len(_key(key))

    # Rounds.

    def barrier(
        self,
        key: str,
        world_size: int,
        timeout: Timeout | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Wait until `world_size` callers have come to the key; it can be used again at once.

        Give `rank` to have a timeout say which ranks did not come. All callers of one round
        either give it or do not.
        """
        raw = _key(key)
        _check_place(rank, world_size)
        with self._observed("barrier", key):
            self._do_barrier(raw, rank, world_size, self._deadline(timeout))

    def gather(
        self,
        key: str,
        rank: int,
        world_size: int,
        value: str | bytes,
        timeout: Timeout | None = None,
    ) -> list[bytes]:
        """Publish this rank's value and return everyone's in rank order, once all came.

        The key can be used again for the next round at once. On a timeout `.missing` has the
        ranks that did not come, and this rank's arrival is withdrawn.
        """
        raw = _key(key)
        _check_place(rank, world_size)
        with self._observed("gather", key):
            return self._do_gather(raw, rank, world_size, _value(value), self._deadline(timeout))

    # Primitives. Keys and values are bytes and checked; those with a deadline wait.

    @abstractmethod
    def _do_set(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def _do_get(self, key: bytes, deadline: Deadline) -> bytes: ...

    @abstractmethod
    def _do_add(self, key: bytes, amount: int) -> int: ...

    @abstractmethod
    def _do_append(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def _do_check(self, keys: list[bytes]) -> bool: ...

    @abstractmethod
    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes: ...

    @abstractmethod
    def _do_delete(self, key: bytes) -> bool: ...

    @abstractmethod
    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None: ...

    @abstractmethod
    def _do_num_keys(self) -> int: ...

    @abstractmethod
    def _do_list_keys(self) -> list[bytes]: ...

    @abstractmethod
    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]: ...

    @abstractmethod
    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None: ...

    @abstractmethod
    def _do_queue_push(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def _do_queue_pop(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes: ...

    @abstractmethod
    def _do_queue_len(self, key: bytes) -> int: ...

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        if rank is not None:
            self._do_gather(key, rank, world_size, b"", deadline)
            return
        arrived = key + b"/arrived"
        number = self._do_add(arrived, 1) - 1
        gate = b"%s/open/%d" % (key, number // world_size)
        if number % world_size == world_size - 1:
            self._do_delete(b"%s/open/%d" % (key, number // world_size - 1))
            self._do_set(gate, b"")
            return
        try:
            self._do_wait([gate], deadline)
        except StoreTimeoutError:
            came = self._do_add(arrived, -1) + 1
            if self._do_check([gate]):
                self._do_add(arrived, 1)
                return
            self._raise_round_timeout("barrier", key, world_size, came % world_size, (), deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        """Gather by plain operations: see the note above."""
        counter = b"%s/rounds/%d" % (key, rank)
        number = self._do_add(counter, 1)
        names = [b"%s/round/%d/%d" % (key, number, r) for r in range(world_size)]
        done = b"%s/round/%d/done" % (key, number)
        self._do_set(names[rank], value)
        try:
            values = self._do_multi_get(names, deadline)
        except StoreTimeoutError:
            missing = [r for r, name in enumerate(names) if not self._do_check([name])]
            if missing:
                self._do_delete(names[rank])
                self._do_add(counter, -1)
                came = world_size - len(missing)
                self._raise_round_timeout("gather", key, world_size, came, missing, deadline)
            values = self._do_multi_get(names, Deadline(5.0))
        if self._do_add(done, 1) == world_size:
            for name in (*names, done):
                self._do_delete(name)
        return values

    # For implementations.

    def _deadline(self, timeout: Timeout | None) -> Deadline:
        return Deadline(self._timeout_s if timeout is None else seconds(timeout))

    def _observed(self, operation: str, key: str) -> AbstractContextManager[object]:
        return _UNOBSERVED if self._observer is None else self._observer(operation, key)

    def _raise_wait_timeout(
        self, operation: str, keys: list[bytes], missing: list[bytes], deadline: Deadline
    ) -> None:
        """Raise the error of a wait for keys that did not come."""
        names = [key.decode("utf-8", "replace") for key in missing]
        first = keys[0].decode("utf-8", "replace")
        story = (
            "it was never set"
            if len(keys) == 1
            else (
                f"{len(keys) - len(missing)} of {len(keys)} keys are there (missing: {_few(names)})"
            )
        )
        raise StoreTimeoutError(
            f"{operation}({first!r}) on {self.endpoint} after {deadline.timeout_s:.1f} s: {story}. "
            f"See what the rank that sets it is doing",
            key=first,
            endpoint=self.endpoint,
            missing=names,
        )

    def _raise_round_timeout(
        self,
        operation: str,
        key: bytes,
        world_size: int,
        came: int,
        missing: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Raise the error of a barrier or gather to which not all came."""
        name = key.decode("utf-8", "replace")
        who = f" (missing: {_few([str(rank) for rank in missing])})" if missing else ""
        raise StoreTimeoutError(
            f"{operation}({name!r}) on {self.endpoint} after {deadline.timeout_s:.1f} s: "
            f"{came} of {world_size} ranks came{who}. See the output of those that did not",
            key=name,
            endpoint=self.endpoint,
            missing=missing,
        )


def _few(names: Sequence[str], most: int = 16) -> str:
    """Join names for a message, cutting a long list."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"


def _key(key: str) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"key must be str, got {type(key).__name__}")
    raw = key.encode("utf-8", "surrogateescape")
    if len(raw) > MAX_KEY_BYTES:
        raise ValueError(f"key of {len(raw)} bytes, limit {MAX_KEY_BYTES}: {key[:60]!r}...")
    return raw


def _keys(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of str, got the str {keys[:60]!r}")
    return [_key(key) for key in keys]


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, bytearray | memoryview):
        value = bytes(value)
    elif not isinstance(value, bytes):
        raise TypeError(f"value must be bytes or str, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"value of {len(value)} bytes, limit {MAX_VALUE_BYTES}")
    raw: bytes = value
    return raw


def _int64(amount: int) -> int:
    if not -(1 << 63) <= amount < 1 << 63:
        raise ValueError(f"amount {amount} does not fit 64 bits")
    return int(amount)


def _check_place(rank: int | None, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
