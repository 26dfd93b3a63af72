"""Provide PrefixStore, a view of a store that prepends a prefix to every key.

The underlying store receives each key as "prefix/key", as with torch's PrefixStore.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta

from echelon.store import arguments
from echelon.store.base import Observer, Store
from echelon.store.deadline import Deadline, Timeout
from echelon.store.pipeline import Step
from echelon.store.presence import Presence
from echelon.store.watch import Change, Watch


class PrefixStore(Store):
    """A view of another store that prepends a prefix to every key.

    The view uses the timeout and the observer of the underlying store, so setting them on the view
    sets them on the underlying store. `num_keys` counts all keys of the underlying store.
    `list_keys` returns only the keys that have the prefix, and strips the prefix.

    Example:
        >>> store = MemoryStore()
        >>> PrefixStore("attempt_3", store).set("port", b"29500")
        >>> store.get("attempt_3/port")
        b'29500'
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(
                f"PrefixStore needs a store from echelon.store, got {type(store).__name__}"
            )
        self.prefix = prefix
        self._store = store
        self._raw_prefix = prefix.encode("utf-8", "surrogateescape") + b"/"

    @property
    def underlying_store(self) -> Store:
        """The store behind this view."""
        return self._store

    @property
    def observer(self) -> Observer | None:
        """The underlying store's observer, to which keys are passed with their prefix."""
        return self._store.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._store.observer = observer

    @property
    def endpoint(self) -> str:
        """The underlying store's address or path."""
        return self._store.endpoint

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of the underlying store."""
        self._store.set_timeout(timeout)

    def clone(self) -> PrefixStore:
        """Clone the underlying store, and return a view of the clone with the same prefix."""
        return PrefixStore(self.prefix, self._store.clone())

    def close(self) -> None:
        """Close the underlying store."""
        self._store.close()

    def _raw(self, key: bytes) -> bytes:
        return arguments.fitting(self._raw_prefix + key)

    def _raws(self, keys: list[bytes]) -> list[bytes]:
        return [self._raw(key) for key in keys]

    def _deadline(self, timeout: Timeout | None) -> Deadline:
        return self._store._deadline(timeout)

    def _observed(self, operation: str, key: str) -> AbstractContextManager[object]:
        return self._store._observed(operation, f"{self.prefix}/{key}")

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._store._do_set(self._raw(key), value)

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        return self._store._do_get(self._raw(key), deadline)

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        self._store._do_set_confirmed(self._raw(key), value)

    def _do_add(self, key: bytes, amount: int) -> int:
        return self._store._do_add(self._raw(key), amount)

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._store._do_append(self._raw(key), value)

    def _do_check(self, keys: list[bytes]) -> bool:
        return self._store._do_check(self._raws(keys))

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._store._do_compare_set(self._raw(key), expected, desired)

    def _do_delete(self, key: bytes) -> bool:
        return self._store._do_delete(self._raw(key))

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        self._store._do_wait(self._raws(keys), deadline)

    def _do_num_keys(self) -> int:
        return self._store._do_num_keys()

    def _do_list_keys(self) -> list[bytes]:
        start = len(self._raw_prefix)
        keys = self._store._do_list_keys()
        return [key[start:] for key in keys if key.startswith(self._raw_prefix)]

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        return self._store._do_multi_get(self._raws(keys), deadline)

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        self._store._do_multi_set(self._raws(keys), values)

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._store._do_queue_push(self._raw(key), value)

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        return self._store._do_queue_pop(self._raw(key))

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        return self._store._do_queue_pop_wait(self._raw(key), deadline)

    def _do_queue_len(self, key: bytes) -> int:
        return self._store._do_queue_len(self._raw(key))

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        self._store._do_barrier(self._raw(key), rank, world_size, deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        return self._store._do_gather(self._raw(key), rank, world_size, value, deadline)

    def _do_pipeline(self, steps: list[Step]) -> None:
        self._store._do_pipeline([replace(step, key=self._raw(step.key)) for step in steps])

    def _do_watch(self, keys: list[bytes]) -> Watch:
        return _StrippedWatch(self._store._do_watch(self._raws(keys)), len(self.prefix) + 1)

    def _do_presence(self, key: bytes, value: bytes, lease_s: float) -> Presence:
        return self._store._do_presence(self._raw(key), value, lease_s)


class _StrippedWatch(Watch):
    """A watch on the underlying store. It strips the prefix from each changed key."""

    def __init__(self, watch: Watch, num_prefix_chars: int) -> None:
        self._watch = watch
        self._num_prefix_chars = num_prefix_chars

    def close(self) -> None:
        self._watch.close()

    def _next(self, deadline: Deadline) -> Change | None:
        change = self._watch._next(deadline)
        return change and Change(change.key[self._num_prefix_chars :], change.value)
