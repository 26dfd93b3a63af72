"""Send several store operations together.

A pipeline takes one round trip for each batch of operations that fits in the socket buffers. All
answers have arrived when the `with` block ends. No operation in a pipeline blocks: a `get` of a
missing key returns None. On stores without a connection, a pipeline is not faster than
individual calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from echelon.errors import StoreError
from echelon.store import arguments

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Reply(Generic[T]):
    """The answer to an operation in a pipeline, available once the pipeline has been sent."""

    __slots__ = ("_answer", "_is_there")

    def __init__(self) -> None:
        self._is_there = False
        self._answer: object = None

    @property
    def value(self) -> T:
        """The answer to the operation.

        Raises:
            StoreError: the operation is not valid for the stored value.
            RuntimeError: the pipeline has not been sent.
        """
        if not self._is_there:
            raise RuntimeError("the pipeline has not been sent yet: exit its `with` block first")
        if isinstance(self._answer, StoreError):
            raise self._answer
        return cast(T, self._answer)

    def settle(self, answer: object) -> None:
        """Set the answer, or the error to raise instead."""
        self._answer = answer
        self._is_there = True


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a pipeline.

    Attributes:
        operation: the name of the operation in the Store API.
        key: the key, as bytes.
        operands: the other arguments, already checked.
        reply: the object that receives the answer.
    """

    operation: str
    key: bytes
    operands: tuple[Any, ...]
    reply: Reply[Any]


class Pipeline:
    """Operations that are sent together when a `with` block ends.

    If the block raises an exception, no operation is sent.
    """

    def __init__(self, send: Callable[[list[Step]], None]) -> None:
        self._send = send
        self._steps: list[Step] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        steps, self._steps = self._steps, []
        if kind is None and steps:
            self._send(steps)

    def set(self, key: str, value: str | bytes) -> Reply[None]:
        """Store a value under a key."""
        return self._step("set", key, arguments.value(value))

    def get(self, key: str) -> Reply[bytes | None]:
        """Return the value of a key, or None if the key is missing."""
        return self._step("get", key)

    def add(self, key: str, amount: int) -> Reply[int]:
        """Add `amount` to a decimal counter, and return the new value."""
        return self._step("add", key, arguments.int64(amount))

    def append(self, key: str, value: str | bytes) -> Reply[None]:
        """Append to the value of a key. A missing key is treated as empty."""
        return self._step("append", key, arguments.value(value))

    def check(self, key: str) -> Reply[bool]:
        """Return whether a key exists."""
        return self._step("check", key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Reply[bytes]:
        """Store `desired` if the value is `expected`; see `Store.compare_set`."""
        return self._step("compare_set", key, arguments.value(expected), arguments.value(desired))

    def delete_key(self, key: str) -> Reply[bool]:
        """Delete a key and the queue of the same name; the reply is True if either existed."""
        return self._step("delete_key", key)

    def queue_push(self, key: str, value: str | bytes) -> Reply[None]:
        """Append an item to a queue."""
        return self._step("queue_push", key, arguments.value(value))

    def queue_len(self, key: str) -> Reply[int]:
        """Return the number of items in a queue."""
        return self._step("queue_len", key)

    def _step(self, operation: str, key: str, *operands: Any) -> Reply[Any]:
        reply: Reply[Any] = Reply()
        self._steps.append(Step(operation, arguments.key(key), operands, reply))
        return reply
