"""Compute the layout of a ring file.

    header | identity, twice | live words | last words | open spans | strings | spans | operations |
    kept operations | recent

The offsets depend only on the two capacities in the header. Each section starts on a page boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.recorder.format.schema import (
    FAULT,
    HEADER,
    KEPT_OPERATION,
    NUM_KEPT,
    NUM_OPEN_SPANS,
    OPERATION_SLOT,
    PAGE_BYTES,
    RECENT_BYTES,
    SPAN_SLOT,
    STRINGS_BYTES,
    Live,
)

# The identity is rewritten occasionally, alternating between two places, so one of them is always
# whole.
IDENTITY_BYTES = (PAGE_BYTES - 64) // 2
IDENTITY_OFFSETS = (64, 64 + IDENTITY_BYTES)
LIVE_OFFSET = PAGE_BYTES
LIVE_BYTES = 8 * Live.NUM_WORDS
FAULT_OFFSET = LIVE_OFFSET + 1024  # in the same page
LAST_WORDS_OFFSET = 2 * PAGE_BYTES
LAST_WORDS_BYTES = 4 * PAGE_BYTES
OPEN_SPANS_OFFSET = LAST_WORDS_OFFSET + LAST_WORDS_BYTES

assert LIVE_OFFSET + LIVE_BYTES <= FAULT_OFFSET
assert FAULT_OFFSET + FAULT.itemsize <= LAST_WORDS_OFFSET
assert HEADER.itemsize <= IDENTITY_OFFSETS[0]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


STRINGS_OFFSET = OPEN_SPANS_OFFSET + _pages(NUM_OPEN_SPANS * SPAN_SLOT.itemsize)


@dataclass(frozen=True, slots=True)
class Layout:
    """The byte offsets of a ring's sections, computed from the ring's capacities."""

    num_operations: int
    num_spans: int

    @property
    def spans_offset(self) -> int:
        """The byte offset of the first slot for ended spans."""
        return STRINGS_OFFSET + _pages(STRINGS_BYTES)

    @property
    def operations_offset(self) -> int:
        """The byte offset of the first slot for operations."""
        return self.spans_offset + _pages(self.num_spans * SPAN_SLOT.itemsize)

    @property
    def kept_offset(self) -> int:
        """The byte offset of the first slot for operations that outlived their original slots."""
        return self.operations_offset + _pages(self.num_operations * OPERATION_SLOT.itemsize)

    @property
    def recent_offset(self) -> int:
        """The byte offset of `recent`, the log of recent signatures, span details and errors."""
        return self.kept_offset + _pages(NUM_KEPT * KEPT_OPERATION.itemsize)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file in bytes."""
        return self.recent_offset + _pages(RECENT_BYTES)
