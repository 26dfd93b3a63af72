"""The reasons for a group's end that its members exchange through shared memory."""

from __future__ import annotations

from enum import IntEnum


class Fault(IntEnum):
    """The C core's `enum ec_fault`; the pure-Python engine uses the same numbers."""

    FINE = 0
    LEFT = 1
    TIMED_OUT = 2
    PEER_LOST = 3
    MISMATCH = 4
    ABORTED = 5
    NO_MEMORY = 6
