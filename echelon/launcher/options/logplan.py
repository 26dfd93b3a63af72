"""Determine where each worker's output goes, based on torchrun's logging options.

Every stream is written to a file. Most streams are also shown on the terminal. A stream that is
redirected with `-r` is shown only if `-t` also selects it. If `--local-ranks-filter` is given, only
the streams of the listed ranks are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path


class Std(IntFlag):
    """The output streams, numbered as in torchrun."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class PerRank:
    """The output streams that an option selects for each local rank."""

    default: Std = Std.NONE
    ranks: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        """Return which streams are selected for one local rank."""
        return self.ranks.get(local_rank, self.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPlan:
    """The destinations of the workers' output."""

    redirects: PerRank = PerRank()
    tee: PerRank = PerRank()
    shown_ranks: frozenset[int] | None = None  # local ranks; None means all
    log_dir: Path | None = None  # holds torchrun's layout; None means the run directory
    filters: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # stream -> substrings
    as_json: bool = False
    fold: bool = False

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Return whether the terminal shows a local rank's stream (1: stdout, 2: stderr)."""
        if self.shown_ranks is not None and local_rank not in self.shown_ranks:
            return False
        bit = Std(stream)
        return not self.redirects.of(local_rank) & bit or bool(self.tee.of(local_rank) & bit)

    def folder(self, rank_dir: Path, job_dir: str, attempt: int, local_rank: int) -> Path:
        """Return the folder for a worker's logs.

        `job_dir` is the name of this job's folder in `log_dir`.
        """
        if self.log_dir is None:
            return rank_dir
        return self.log_dir / job_dir / f"attempt_{attempt}" / str(local_rank)


def parse_streams(text: str) -> PerRank:
    """Parse a choice of streams for each local rank, for example `3`, `0:3,1:2` or `0-7:3,12:1`.

    Raises:
        ValueError: the text is malformed.
    """
    if not text:
        return PerRank()
    if ":" not in text:
        return PerRank(_streams(text))
    ranks: dict[int, Std] = {}
    for pair in text.split(","):
        span, colon, streams = pair.partition(":")
        if not colon:
            raise ValueError(f"expected RANK:STREAMS, got {pair!r}")
        for rank in parse_ranks(span):
            ranks[rank] = _streams(streams)
    return PerRank(Std.NONE, ranks)


def parse_ranks(text: str) -> frozenset[int]:
    """Parse a list of ranks such as `0,2,8-15`.

    Raises:
        ValueError: the text is malformed.
    """
    ranks: set[int] = set()
    for span in text.split(","):
        first, dash, last = span.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueError(f"expected a rank or a range of ranks, got {span!r}") from None
        if not 0 <= low <= high <= 1 << 16:
            raise ValueError(f"expected a rank or a range of ranks, got {span!r}")
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def parse_filters(text: str) -> tuple[str, ...]:
    """Parse a list of filters such as `apple,orange`. Two commas stand for a literal comma."""
    parts = text.replace(",,", "\0").split(",") if text else []
    return tuple(part.replace("\0", ",") for part in parts if part)


def _streams(text: str) -> Std:
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), got {text!r}")
    return Std(int(text))
