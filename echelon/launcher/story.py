"""What the root cause said last: the part of a report that comes before the verdict.

The traceback is the last one in the rank's stderr, so user code needs no decorator; where there is
none, the last lines stand in. Victims are one line, however many they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import DumpFormatError
from echelon.recorder.read import read
from echelon.recorder.schema import Record

_MAX_TRACEBACK_LINES = 24
_MAX_LAST_LINES = 6
_MAX_LINE_CHARS = 300
_BEGINNINGS = ("Traceback (most recent call last):", "Fatal Python error:")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What the root cause left on its stderr, for the terminal and for report.json."""

    rank: int
    exit_code: int | None
    traceback: tuple[str, ...]  # the last block, [] if there is none
    last_lines: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return what the terminal shows; nothing for a rank that said nothing."""
        said = self.traceback or self.last_lines
        if not said:
            return []
        what = "its traceback" if self.traceback else "its last lines"
        return [f"rank {self.rank}, {what}:", *(f"  {line}" for line in said)]

    def to_json(self) -> dict[str, Any]:
        """Return what report.json holds."""
        return {
            "rank": self.rank,
            "exit_code": self.exit_code,
            "traceback": list(self.traceback),
            "last_lines": list(self.last_lines),
        }


def root_cause_story(incident: Path, verdict: Mapping[str, Any] | None) -> Story | None:
    """Tell what the first culprit said; None where nobody is named or nothing is known."""
    for rank in (verdict or {}).get("culprit_ranks", [])[:1]:
        try:
            record = read(incident / f"rank_{int(rank)}")
        except DumpFormatError:
            return None
        return story_of(record)
    return None


def story_of(record: Record) -> Story:
    """Tell what one rank said last."""
    lines = [_clean(line) for line in record.host.stderr_tail.splitlines()]
    block = last_traceback(lines)
    if not block and record.last_words is not None:
        block = [_clean(line) for line in record.last_words.traceback.splitlines()]
    return Story(
        rank=record.identity.rank,
        exit_code=record.host.exit_code,
        traceback=tuple(_shortened(block)),
        last_lines=tuple(line for line in lines if line.strip())[-_MAX_LAST_LINES:],
    )


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the last traceback's lines, from its headline to the exception's own line."""
    starts = [i for i, line in enumerate(lines) if line.startswith(_BEGINNINGS)]
    if not starts:
        return []
    block = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        block.append(line)
        if line and not line[0].isspace() and block[0].startswith("Traceback"):
            break  # the exception's own line
    return block


def _shortened(block: list[str]) -> list[str]:
    if len(block) <= _MAX_TRACEBACK_LINES:
        return block
    kept = _MAX_TRACEBACK_LINES - 2
    return [block[0], f"  ... {len(block) - kept - 1} lines ...", *block[-kept:]]


def _clean(line: str) -> str:
    """Take out what would control a terminal."""
    return _CONTROL.sub("", line)[:_MAX_LINE_CHARS]
