"""Each cause of docs/verdicts.md, told as the story of a job: a file for each family of causes."""

from tests.analysis.stories import (
    caught,
    crossed,
    days,
    elsewhere,
    ended,
    machine,
    mismatched,
    several,
    skipped,
    stuck,
    survived,
    words,
)
from tests.analysis.stories.story import STORIES

__all__ = [
    "STORIES",
    "caught",
    "crossed",
    "days",
    "elsewhere",
    "ended",
    "machine",
    "mismatched",
    "several",
    "skipped",
    "stuck",
    "survived",
    "words",
]
