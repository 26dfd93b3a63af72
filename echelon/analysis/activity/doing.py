"""Define the results of the classifier: what a thread is doing, and the frames that show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from echelon.analysis.evidence.stacks.frames import Frame


class Doing(Enum):
    """What a thread is doing, as a phrase that follows "rank R "."""

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
    """What one thread is doing, with the frames that show it.

    Attributes:
        line: the line to report, which is the innermost line of user code if possible.
        by: the frame or C function that shows the activity.
        is_nested: whether the phase is running user code, such as a data set's `__getitem__`.
    """

    doing: Doing
    line: Frame | None = None
    by: str = ""
    is_nested: bool = False
