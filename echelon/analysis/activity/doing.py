"""The classifier's result: a thread's activity and the frame that indicates it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from echelon.analysis.evidence.stacks.frames import Frame


class Doing(Enum):
    """A thread's activity. The value is a phrase that completes "rank R ..."."""

    COLLECTIVE = "waits for its peers in a collective"
    BACKWARD = "is in a backward pass"
    LOADING = "waits for its next batch"
    CHECKPOINT = "writes or reads a checkpoint"
    COMPILING = "compiles"
    MEETING = "waits for its peers at the store"
    STORE = "waits for the store"
    IMPORTING = "imports a module"
    LOCK = "waits for a lock or for another thread"
    CHILD = "waits for a child process"
    NETWORK = "waits for data from the network"
    DEVICE = "waits for its device"
    USER = "is in the user's code"
    LIBRARY = "is in a library"
    UNKNOWN = "shows no stack"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The activity of one thread, with the frame that indicates it.

    Attributes:
        line: the frame to report: the innermost frame of user code, if the stack has one.
        by: the frame or C function that indicates the activity.
        is_nested: True if the activity is a library phase that calls user code, for example a data
            set's `__getitem__`.
    """

    doing: Doing
    line: Frame | None = None
    by: str = ""
    is_nested: bool = False
