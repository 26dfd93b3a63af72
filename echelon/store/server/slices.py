"""Produce answers that cover the whole store, in time slices.

Each function is a generator that yields between slices and returns the answer. The answer describes
the store at the moment of the query. With four million keys, the server's default limit, copying
the references to the keys or values takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Generator

from echelon.store.state.state import StoreState
from echelon.store.wire import protocol as p

SLICE = 10_000  # keys or values per turn of the loop: about a millisecond
SLICE_BYTES = 4 << 20  # of them, all together


def packed_keys(state: StoreState, limit_bytes: int) -> Generator[None, None, list[bytes]]:
    """Return all keys in wire encoding, as a list of chunks.

    Raises:
        ValueError: the encoding is longer than `limit_bytes`, the limit on a reply.
    """
    return packed("list_keys", list(state.values), limit_bytes)


def packed(
    operation: str, strings: list[bytes], limit_bytes: int
) -> Generator[None, None, list[bytes]]:
    """Return strings in wire encoding, as a list of chunks.

    Raises:
        ValueError: the encoding is longer than `limit_bytes`, the limit on a reply.
    """
    pieces: list[bytes] = []
    size, start = 0, 0
    while start < len(strings):
        if start:
            yield
        end = start
        ends_at = size + SLICE_BYTES
        while end < len(strings) and end - start < SLICE and size < ends_at:
            size += len(strings[end]) + 8
            end += 1
        if size > limit_bytes:
            raise ValueError(f"the reply to {operation} exceeds the limit of {limit_bytes} bytes")
        pieces.append(p.pack_strings(strings[start:end]))
        start = end
    return pieces


def total_bytes(state: StoreState) -> Generator[None, None, int]:
    """Return the total size of all values and queued items, in bytes."""
    held = list(state.values.values())
    for queue in state.queues.values():
        held += queue
    total = 0
    for start in range(0, len(held), SLICE):
        if start:
            yield
        total += sum(map(len, held[start : start + SLICE]))
    return total
