"""Collect the last output of the culprit rank, which is shown before the verdict.

The first available item is shown: the traceback in TORCHELASTIC_ERROR_FILE, the last traceback in
the rank's stderr, the traceback in the rank's ring, or the last lines of stderr. One line lists the
ranks that ended because of the culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.analysis.finding import rank_list
from echelon.errors import DumpFormatError
from echelon.launcher.job.report import Ended
from echelon.recorder.format.schema import Record
from echelon.recorder.read import read

_MAX_TRACEBACK_LINES = 24
_MAX_LAST_LINES = 6
_MAX_LINE_CHARS = 300
_BEGINNINGS = ("Traceback (most recent call last):", "Fatal Python error:")
_TORCHS_PREFIX = re.compile(r"\A\[rank\d{1,7}\]: ?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """The culprit's last output, as shown on the terminal and in report.json."""

    rank: int
    exit_code: int | None
    traceback: tuple[str, ...]  # the last block, [] if there is none
    last_lines: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the lines for the terminal; [] if the output does not explain why the rank ended.

        If the rank hung or was killed by SIGKILL, only a traceback is shown.
        """
        is_silent = self.exit_code is None or self.exit_code == -signal.SIGKILL
        said = self.traceback or (() if is_silent else self.last_lines)
        if not said:
            return []
        what = "its traceback" if self.traceback else "its last lines"
        return [f"rank {self.rank}, {what}:", *(f"  {line}" for line in said)]

    def to_json(self) -> dict[str, Any]:
        """Return the culprit's last output as an entry of report.json."""
        return {
            "rank": self.rank,
            "exit_code": self.exit_code,
            "traceback": list(self.traceback),
            "last_lines": list(self.last_lines),
        }


def root_cause_story(incident: Path, verdict: Mapping[str, Any] | None) -> Story | None:
    """Return the first culprit's last output; None if it is not available."""
    for rank in (verdict or {}).get("culprit_ranks", [])[:1]:
        try:
            record = read(incident / f"rank_{int(rank)}")
        except DumpFormatError:
            return None
        return story_of(record)
    return None


def story_of(record: Record) -> Story:
    """Return the last output of one rank."""
    lines = [_clean(line) for line in record.host.stderr_tail.splitlines()]
    block = last_traceback([_clean(line) for line in record.host.error_file.splitlines()])
    block = block or last_traceback(lines)
    if not block and record.last_words is not None:
        block = [_clean(line) for line in record.last_words.traceback.splitlines()]
    return Story(
        rank=record.identity.rank,
        exit_code=record.host.exit_code,
        traceback=tuple(_shortened(block)),
        last_lines=tuple(line for line in lines or _message(record) if line.strip())[
            -_MAX_LAST_LINES:
        ],
    )


def _message(record: Record) -> list[str]:
    return [_clean(line) for line in record.host.error_file.splitlines()]


@dataclass(frozen=True, slots=True)
class Victims:
    """The ranks that ended because another rank failed, and how they ended."""

    failed: tuple[int, ...]
    stopped: tuple[int, ...]  # by the launcher

    @classmethod
    def of(
        cls,
        verdict: Mapping[str, Any] | None,
        ended: Mapping[int, Ended],
        lost_earlier: Collection[int] = (),
    ) -> Victims:
        """Collect the ranks that failed or were stopped because of the culprits.

        Ranks in `lost_earlier` are left out. If the verdict does not name a culprit, there are no
        victims.
        """
        culprits = set((verdict or {}).get("culprit_ranks", []))
        apart = {*culprits, *lost_earlier}
        others = [one for rank, one in sorted(ended.items()) if culprits and rank not in apart]
        return cls(
            tuple(one.rank for one in others if one.code != 0 and not one.stopped),
            tuple(one.rank for one in others if one.stopped),
        )

    def line(self) -> str:
        """Return one line about all victims; "" if no rank is a victim."""
        parts = [
            f"{words}: {rank_list(ranks)}"
            for ranks, words in (
                (self.failed, "failed after it"),
                (self.stopped, "also stopped by the launcher"),
            )
            if ranks
        ]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the victims as an entry in report.json."""
        return {"failed": list(self.failed), "stopped": list(self.stopped)}


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the lines of the last traceback, from its header to the exception's line."""
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
    """Return a line without control characters and without the rank prefix that torch adds."""
    return _TORCHS_PREFIX.sub("", _CONTROL.sub("", line), count=1)[:_MAX_LINE_CHARS]
