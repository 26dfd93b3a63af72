"""Define the interface of all stores: torch's Store API with additions such as `gather`.

`Store` checks arguments, encodes text as bytes and sets a deadline for every call. Each subclass
implements the `_do_*` primitives. For a subclass without its own gather or barrier, `Store` builds
both from plain operations.

[Note: a round of plain operations] Each rank counts its uses of a key with `add`, and the count is
the round number. The rank writes its value under key/round/number/rank and waits for all values of
the round. The last rank to read the values deletes them. A round takes five round trips. A rank
that times out removes its value and decrements its counter. Two problems remain. First, a rank that
dies after arriving is not detected. Second, if a timeout coincides with the last arrival, ranks can
disagree on the round number, and every later use of the key times out.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store import arguments
from echelon.store.deadline import Deadline, Timeout, seconds
from echelon.store.pipeline import Pipeline, Step
from echelon.store.presence import Presence
from echelon.store.watch import LookingWatch, Watch

if TYPE_CHECKING:
    from typing_extensions import Self

Observer = Callable[[str, str], AbstractContextManager[object]]

DEFAULT_TIMEOUT_S: Final = 300.0
LEASE_S: Final = 10.0

_LOOK_S: Final = 0.05
_CHECK_S: Final = 1.0
_UNOBSERVED: Final = contextlib.nullcontext()


class Store(ABC):
    """Keys, counters, queues, barriers and gathers that several processes share.

    Values are bytes; text is encoded as UTF-8. A call without a timeout of its own uses the store's
    timeout. All methods are thread-safe.

    All calls can raise:
        StoreTimeoutError: the timeout expired; `.missing` lists the missing keys or ranks.
        StoreConnectionError: the server cannot be reached or has closed the connection.
        StoreError: the operation is not valid for the stored value.
        ValueError, TypeError: the arguments are invalid.
    """

    _observer: Observer | None = None
    _timeout_s: float = DEFAULT_TIMEOUT_S

    # Settings.

    @property
    def observer(self) -> Observer | None:
        """A function that is called before each call that can block; None if not set.

        The function receives the name of the call and its first key, and returns a context manager
        within which the call runs.
        """
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls that do not specify their own."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of calls that do not specify their own."""
        self._timeout_s = seconds(timeout)

    @property
    def endpoint(self) -> str:
        """The store's address or path, for error messages."""
        return type(self).__name__

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are always available."""
        return True

    @abstractmethod
    def clone(self) -> Store:
        """Return another store with the same keys and its own connection."""

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to free
        """Release the store's resources; further calls fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Keys.

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._do_set(arguments.key(key), arguments.value(value))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of a key, blocking until the key has a value."""
        raw = arguments.key(key)
        with self._observed("get", key):
            return self._do_get(raw, self._deadline(timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter and return the new value. A missing counter counts as 0."""
        return self._do_add(arguments.key(key), arguments.int64(amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key. A missing key is treated as empty."""
        self._do_append(arguments.key(key), arguments.value(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, without blocking."""
        return self._do_check(arguments.keys(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the key's value is `expected`; "" matches a missing key.

        Returns the value that the key has afterwards, or `expected` if the key is still missing.
        """
        return self._do_compare_set(
            arguments.key(key), arguments.value(expected), arguments.value(desired)
        )

    def delete_key(self, key: str) -> bool:
        """Delete a key, and the queue of the same name; return whether either existed."""
        return self._do_delete(arguments.key(key))

    def wait(
        self,
        keys: Sequence[str],
        timeout: Timeout | None = None,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Wait until every key has a value or names a non-empty queue.

        Args:
            check: a function that is called about once per second during the wait; if it raises an
                exception, the wait ends with that exception.
        """
        raw = arguments.keys(keys)
        if not raw:
            return
        with self._observed("wait", keys[0]):
            deadline = self._deadline(timeout)
            while check is not None and deadline.left_s > _CHECK_S:
                with contextlib.suppress(StoreTimeoutError):
                    self._do_wait(raw, Deadline(_CHECK_S))
                    return
                check()
            self._do_wait(raw, deadline)

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return self._do_num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys in no particular order."""
        return [key.decode("utf-8", "surrogateescape") for key in self._do_list_keys()]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of several keys, blocking until all keys have values."""
        raw = arguments.keys(keys)
        if not raw:
            return []
        with self._observed("multi_get", keys[0]):
            return self._do_multi_get(raw, self._deadline(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values at once."""
        raw = arguments.keys(keys)
        if len(raw) != len(values):
            raise ValueError(
                f"multi_set needs one value per key, got {len(raw)} keys and {len(values)} values"
            )
        if raw:
            checked = [arguments.value(value) for value in values]
            arguments.together(raw, checked)
            self._do_multi_set(raw, checked)

    # Queues.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        self._do_queue_push(arguments.key(key), arguments.value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest item in a queue; wait for an item unless `block` is False.

        Raises:
            StoreError: the queue is empty and `block` is False.
        """
        raw = arguments.key(key)
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
        """Return the number of items in a queue."""
        return self._do_queue_len(arguments.key(key))

    # Rounds.

    def barrier(
        self,
        key: str,
        world_size: int,
        timeout: Timeout | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Wait until `world_size` callers have arrived at the barrier `key`.

        The key can be reused for another round immediately. In a round, either all callers or none
        must pass `rank`. If `rank` is given, a timeout error names the missing ranks.
        """
        raw = arguments.key(key)
        arguments.check_place(rank, world_size)
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
        """Publish this rank's value and return the values of all ranks in rank order.

        Blocks until all ranks have arrived. The key can be reused for another round immediately. On
        a timeout, this rank's arrival is withdrawn, and the error's `.missing` lists the missing
        ranks.
        """
        raw = arguments.key(key)
        arguments.check_place(rank, world_size)
        with self._observed("gather", key):
            return self._do_gather(
                raw, rank, world_size, arguments.value(value), self._deadline(timeout)
            )

    # Beyond torch's API. On our server each is one round trip; elsewhere plain operations stand in.

    def set_confirmed(self, key: str, value: str | bytes) -> None:
        """Store a value, and block until the store has confirmed receipt."""
        self._do_set_confirmed(arguments.key(key), arguments.value(value))

    def pipeline(self) -> Pipeline:
        """Return a context manager that sends several operations together; see `Pipeline`."""
        return Pipeline(self._do_pipeline)

    def watch(self, keys: Sequence[str]) -> Watch:
        """Start watching keys for changes. The caller must close the returned watch."""
        return self._do_watch(arguments.keys(keys))

    def presence(self, key: str, value: str | bytes = b"", *, lease: Timeout = LEASE_S) -> Presence:
        """Store a key that exists until the returned object is closed or this process dies.

        On echelon's server, the key has a lease, which a thread of this client renews. The server
        removes the key 2 s after the process dies, or `lease` seconds after the host fails or the
        process is suspended. On other stores, a killed process leaves the key behind.

        Raises:
            ValueError: `lease` is not between 0.1 s and 600 s.
        """
        lease_s = seconds(lease)
        if not 0.1 <= lease_s <= 600:
            raise ValueError(f"lease_s must be from 0.1 to 600, got {lease_s}")
        return self._do_presence(arguments.key(key), arguments.value(value), lease_s)

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

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        self._do_set(key, value)

    def _do_look(self, key: bytes) -> bytes | None:
        """Return the value of a key without blocking, or None if the key is missing."""
        if not self._do_check([key]):
            return None
        try:
            return self._do_get(key, Deadline(_LOOK_S))
        except StoreTimeoutError:  # deleted in the meantime, or a queue of that name
            return None

    def _do_pipeline(self, steps: list[Step]) -> None:
        acts: dict[str, Callable[..., Any]] = {
            "set": self._do_set,
            "get": self._do_look,
            "add": self._do_add,
            "append": self._do_append,
            "check": lambda key: self._do_check([key]),
            "compare_set": self._do_compare_set,
            "delete_key": self._do_delete,
            "queue_push": self._do_queue_push,
            "queue_len": self._do_queue_len,
        }
        for step in steps:
            try:
                step.reply.settle(acts[step.operation](step.key, *step.operands))
            except StoreError as error:
                step.reply.settle(error)

    def _do_watch(self, keys: list[bytes]) -> Watch:
        return LookingWatch(keys, self._do_look)

    def _do_presence(self, key: bytes, value: bytes, lease_s: float) -> Presence:  # noqa: ARG002
        self._do_set(key, value)
        return Presence(lambda: self._do_delete(key))

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        if rank is not None:
            self._do_gather(key + b"/barrier", rank, world_size, b"", deadline)
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
        """Perform a gather using plain operations (see the note in the module docstring)."""
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
    ) -> NoReturn:
        """Raise the timeout error for a wait during which some keys were never set."""
        names = [key.decode("utf-8", "replace") for key in missing]
        first = keys[0].decode("utf-8", "replace")
        story = (
            "the key was never set"
            if len(keys) == 1
            else (f"{len(keys) - len(missing)} of {len(keys)} keys exist (missing: {_few(names)})")
        )
        raise StoreTimeoutError(
            f"{operation}({first!r}) on {self.endpoint} timed out after "
            f"{deadline.timeout_s:.1f} s: {story}. Check the rank that should set the key",
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
    ) -> NoReturn:
        """Raise the timeout error for a barrier or gather that some ranks did not join."""
        name = key.decode("utf-8", "replace")
        who = f" (missing: {_few([str(rank) for rank in missing])})" if missing else ""
        raise StoreTimeoutError(
            f"{operation}({name!r}) on {self.endpoint} timed out after "
            f"{deadline.timeout_s:.1f} s: {came} of {world_size} ranks arrived{who}. "
            "See the output of the missing ranks",
            key=name,
            endpoint=self.endpoint,
            missing=missing,
        )


def _few(names: Sequence[str], most: int = 16) -> str:
    """Join up to `most` names for an error message, and append the number of omitted names."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"
