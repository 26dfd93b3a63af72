"""Define `Reading`, and the signature of the tests that return one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import Frame
from echelon.analysis.finding import Cause, Confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A test's conclusion about what one rank is doing."""

    cause: Cause
    confidence: Confidence
    words: str  # after "rank R "
    frame: Frame | None = None
    evidence: tuple[str, ...] = ()
    would_settle: tuple[str, ...] = ()
    action: str = ""  # what to do next, if it differs from the cause's usual advice


# Each test takes the picture and one rank; most look at the rank alone.
Test = Callable[[Picture, RankEvidence], Reading | None]
