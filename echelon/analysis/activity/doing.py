"""The answers of the classifier: what a thread does, and the frames that say so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from echelon.analysis.evidence.stacks import Frame


class Doing(Enum):
    """What a thread does, as words after "rank R "."""

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
    """What one thread does.

    Attributes:
        line: the line to name: the user's innermost frame, else the innermost of a file.
        by: the frame, or the C function, that decided.
        is_nested: the user's own code runs below the phase: a data set's `__getitem__` in the rank
            itself, a backend's function within the compiler.
    """

    doing: Doing
    line: Frame | None = None
    by: str = ""
    is_nested: bool = False
