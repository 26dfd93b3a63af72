"""Provide MemoryStore, a store inside one process, without a server.

The store is meant for tests and for worlds of one rank. Threads can share the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from echelon.errors import StoreError
from echelon.store.base import DEFAULT_TIMEOUT_S, Observer, Store
from echelon.store.deadline import Deadline, Timeout, seconds
from echelon.store.state.state import StoreState
from echelon.store.state.waiters import RoundStory, Waiter, Wants

T = TypeVar("T")


class _Caller:
    """A blocked call, whose thread sleeps until the call's waiter is satisfied."""

    def __init__(self) -> None:
        self._is_awake = threading.Event()

    def wake(self) -> None:
        self._is_awake.set()

    def sleep(self, deadline: Deadline) -> bool:
        return self._is_awake.wait(deadline.left_s)


class MemoryStore(Store):
    """A store that the threads of one process share.

    Args:
        timeout: the timeout of calls that do not specify their own.
        observer: see `Store.observer`.

    Example:
        >>> store = MemoryStore(timeout=10)
        >>> store.set("ready", b"yes")
        >>> store.add("arrived", 1)
        1
        >>> store.clone().get("ready")  # for another thread
        b'yes'
    """

    def __init__(
        self, timeout: Timeout = DEFAULT_TIMEOUT_S, *, observer: Observer | None = None
    ) -> None:
        self._timeout_s = seconds(timeout)
        self._observer = observer
        self._state = StoreState()
        self._lock = threading.Lock()

    def clone(self) -> MemoryStore:
        """Return another store object that shares the same keys and values."""
        twin = MemoryStore(self._timeout_s, observer=self._observer)
        twin._state, twin._lock = self._state, self._lock
        return twin

    def _run(self, act: Callable[[StoreState], T]) -> T:
        """Perform an operation on the state, and wake the callers whose waits it satisfies."""
        with self._lock:
            result = act(self._state)
            self._wake()
        return result

    def _wake(self) -> None:
        woken = self._state.woken
        for waiter in woken:
            assert isinstance(waiter.owner, _Caller)
            waiter.owner.wake()
        woken.clear()

    def _sleep(self, caller: _Caller, waiter: Waiter, deadline: Deadline) -> RoundStory | None:
        """Sleep until the waiter is woken, and return None.

        If the deadline passes first, withdraw the waiter and return the status of its barrier or
        gather. If the waiter belongs to neither, the status is empty.
        """
        if caller.sleep(deadline):
            return None
        with self._lock:
            if caller.sleep(Deadline(0.0)):  # woken while we took the lock
                return None
            story = self._state.story_of(waiter)
            self._state.withdraw(waiter)
            return story

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._run(lambda state: state.set(key, value))

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        caller = _Caller()
        with self._lock:
            waiter = self._state.wait(caller, Wants.VALUE, [key])
            if waiter is None:
                return self._state.values[key]
        if self._sleep(caller, waiter, deadline):
            self._raise_wait_timeout("get", [key], [key], deadline)
        return waiter.value

    def _do_add(self, key: bytes, amount: int) -> int:
        try:
            return self._run(lambda state: state.add(key, amount))
        except ValueError as error:
            raise StoreError(f"add on {self.endpoint}: {error}", key=key.decode()) from None

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._run(lambda state: state.append(key, value))

    def _do_check(self, keys: list[bytes]) -> bool:
        return self._run(lambda state: all(map(state.is_present, keys)))

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._run(lambda state: state.compare_set(key, expected, desired))

    def _do_delete(self, key: bytes) -> bool:
        return self._run(lambda state: state.delete(key))

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        caller = _Caller()
        with self._lock:
            waiter = self._state.wait(caller, Wants.WAKE, keys)
        if waiter is None or not self._sleep(caller, waiter, deadline):
            return
        missing = [key for key in keys if not self._do_check([key])]
        self._raise_wait_timeout("wait", keys, missing, deadline)

    def _do_num_keys(self) -> int:
        return self._run(lambda state: len(state.values))

    def _do_list_keys(self) -> list[bytes]:
        return self._run(lambda state: list(state.values))

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        caller = _Caller()
        with self._lock:
            waiter = self._state.wait(caller, Wants.VALUES, keys)
            if waiter is None:
                return [self._state.values[key] for key in keys]
        if self._sleep(caller, waiter, deadline):
            missing = [key for key in keys if not self._do_check([key])]
            self._raise_wait_timeout("multi_get", keys, missing, deadline)
        assert waiter.values is not None
        return waiter.values

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        self._run(lambda state: state.set_many(zip(keys, values, strict=True)))

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._run(lambda state: state.push(key, value))

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        count, item = self._run(lambda state: state.pop(key, self))
        return item if count else None

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        caller = _Caller()
        waiter = self._run(lambda state: state.wait_item(caller, key))
        if isinstance(waiter, bytes):
            return waiter
        if self._sleep(caller, waiter, deadline):
            self._raise_wait_timeout("queue_pop", [key], [key], deadline)
        return waiter.value

    def _do_queue_len(self, key: bytes) -> int:
        return self._run(lambda state: state.queue_length(key))

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        self._arrive(Wants.BARRIER, key, -1 if rank is None else rank, world_size, b"", deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        waiter = self._arrive(Wants.GATHER, key, rank, world_size, value, deadline)
        assert waiter.values is not None
        return list(waiter.values)

    def _arrive(
        self,
        wants: Wants,
        key: bytes,
        rank: int,
        world_size: int,
        value: bytes,
        deadline: Deadline,
    ) -> Waiter:
        caller = _Caller()
        try:
            waiter = self._run(lambda s: s.arrive(caller, wants, key, rank, world_size, value))
        except ValueError as error:
            raise StoreError(f"{wants.value} on {self.endpoint}: {error}") from None
        story = self._sleep(caller, waiter, deadline)
        if story is not None:
            self._raise_round_timeout(wants.value, key, world_size, *story[1:], deadline)
        if waiter.failure is not None:
            raise StoreError(f"{wants.value} on {self.endpoint}: {waiter.failure}")
        return waiter
