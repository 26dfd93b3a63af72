"""How a story is told: a function that makes a job, under the cause and the ranks to be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.analysis.imagined_job import Job

Teller = Callable[[], Job]


@dataclass(frozen=True)
class Story:
    """A job, and what is to be said of it."""

    cause: str
    culprits: list[int]
    kind: str  # of the incident
    tell: Teller
    confidence: str = ""  # "": not told
    also: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the other findings, in order


STORIES: dict[str, Story] = {}


def story(
    cause: str,
    culprits: list[int],
    kind: str = "stall",
    confidence: str = "",
    also: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> Callable[[Teller], Teller]:
    """Keep the function below as a story, under its own name."""

    def keep(tell: Teller) -> Teller:
        assert tell.__name__ not in STORIES, tell.__name__
        STORIES[tell.__name__] = Story(cause, culprits, kind, tell, confidence, also)
        return tell

    return keep
