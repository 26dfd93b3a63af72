"""Report changes to a set of keys.

Echelon's server pushes every change, in order. On every other store, a watch polls every 20 ms and
can miss some values.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.errors import StoreTimeoutError
from echelon.store.deadline import Deadline, Timeout, seconds

if TYPE_CHECKING:
    from typing_extensions import Self

_LOOK_S = 0.02


@dataclass(frozen=True)
class Change:
    """A change to a watched key.

    Attributes:
        key: the key that changed.
        value: the new value, or None if the key was deleted.
    """

    key: str
    value: bytes | None


class Watch(ABC):
    """A subscription to a set of keys. The caller must close the watch."""

    def next(self, timeout: Timeout) -> Change:
        """Wait for the next change, and return it.

        Raises:
            StoreTimeoutError: nothing changed in time; the watch remains usable.
            StoreConnectionError: the connection to the server was lost, or the watch was closed.
        """
        deadline = Deadline(seconds(timeout))
        change = self._next(deadline)
        if change is None:
            raise StoreTimeoutError(f"watch: nothing changed within {deadline.timeout_s:.1f} s")
        return change

    def close(self) -> None:  # noqa: B027 - a watch that looks for itself holds nothing
        """Stop watching."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _next(self, deadline: Deadline) -> Change | None:
        """Return the next change, or None if the deadline passes first."""


class LookingWatch(Watch):
    """A watch that polls its keys.

    Args:
        look: a function that returns the value of a key without blocking, or None if the key is
            missing.
    """

    def __init__(self, keys: list[bytes], look: Callable[[bytes], bytes | None]) -> None:
        self._look = look
        self._seen = {key: look(key) for key in keys}
        self._found: deque[Change] = deque()

    def _next(self, deadline: Deadline) -> Change | None:
        while True:
            if not self._found:
                self._look_again()
            if self._found:
                return self._found.popleft()
            left_s = deadline.left_s
            if left_s <= 0:
                return None
            time.sleep(min(_LOOK_S, left_s))

    def _look_again(self) -> None:
        for key, before in self._seen.items():
            value = self._look(key)
            if value != before:
                self._seen[key] = value
                self._found.append(Change(key.decode("utf-8", "surrogateescape"), value))
