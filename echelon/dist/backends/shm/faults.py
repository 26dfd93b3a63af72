"""Define the codes that members store in shared memory to report why they left a group."""

from __future__ import annotations

from enum import IntEnum


class Fault(IntEnum):
    """The values of the C core's `enum ec_fault`, which the pure-Python engine also uses."""

    FINE = 0
    LEFT = 1
    TIMED_OUT = 2
    PEER_LOST = 3
    MISMATCH = 4
    ABORTED = 5
    NO_MEMORY = 6
