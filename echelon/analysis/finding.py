"""The result of an analysis: a report of findings, each with a cause, culprits and evidence.

`docs/verdicts.md` explains the terms. `Report.to_json` defines the output format of `fr-analyze
--json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.analysis.evidence.stacks.tree import Branch

REPORT_FORMAT = 1


class Cause(str, Enum):
    """The reason a job stopped (see `docs/verdicts.md`).

    Example:
        >>> Cause("host_hang") is Cause.HOST_HANG
        True
        >>> print(Cause.OUT_OF_MEMORY.value)
        out_of_memory
    """

    OP_MISMATCH = "op_mismatch"
    SHAPE_MISMATCH = "shape_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    REDUCE_OP_MISMATCH = "reduce_op_mismatch"
    ROOT_MISMATCH = "root_mismatch"
    SPLIT_MISMATCH = "split_mismatch"
    SKIPPED_COLLECTIVE = "skipped_collective"
    ORDER_DESYNC = "order_desync"
    P2P_UNMATCHED = "p2p_unmatched"
    DATA_STARVATION = "data_starvation"
    STORAGE_STALL = "storage_stall"
    COMPILE_STALL = "compile_stall"
    STORE_WAIT = "store_wait"
    HOST_HANG = "host_hang"
    GIL_HANG = "gil_hang"
    EXCEPTION = "exception"
    DEAD_PROCESS = "dead_process"
    OUT_OF_MEMORY = "out_of_memory"
    FROZEN_PROCESS = "frozen_process"
    DEVICE_STUCK = "device_stuck"
    NETWORK = "network"
    STRAGGLER = "straggler"
    UNKNOWN = "unknown"


class Confidence(str, Enum):
    """The certainty of a finding.

    Example:
        >>> [confidence.value for confidence in Confidence]
        ['certain', 'likely', 'possible']
    """

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Scope(Enum):
    """The rule that determines which ranks, other than the culprits, a finding explains."""

    CULPRITS = "those who wait for its culprits"
    GROUP = "those inside its operation or a later one of its group"
    FALLOUT = "the ranks that it lists as fallout"
    SHARED = "those who share an operation with its culprits, which are inside it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A finding that was rejected as a root cause, with the argument against it."""

    cause: Cause
    culprit_ranks: tuple[int, ...]
    confidence: Confidence  # confidence in its observation
    summary: str
    against: str

    def to_json(self) -> dict[str, Any]:
        """Return the rejected finding as a JSON object in the format of `fr-analyze --json`."""
        return {
            "cause": self.cause.value,
            "culprit_ranks": list(self.culprit_ranks),
            "confidence": self.confidence.value,
            "summary": self.summary,
            "against": self.against,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault, with the ranks that caused it and the evidence for it.

    `operation` and `sequence` identify the operation in which other ranks are waiting, or on which
    the ranks disagree. Both can be None. A finding marked `info` is never the verdict.

    Example:
        >>> finding = analyze(incident).verdict
        >>> finding.cause.value, finding.culprit_ranks, finding.confidence.value
        ('host_hang', (1,), 'certain')
        >>> finding.operation, finding.sequence  # where the other ranks wait for rank 1
        ('all_reduce', 1)
    """

    cause: Cause
    culprit_ranks: tuple[int, ...]
    confidence: Confidence
    summary: str
    group: str | None = None
    operation: str | None = None
    sequence: int | None = None
    evidence: tuple[str, ...] = ()
    fallout_ranks: tuple[int, ...] = ()
    would_settle: tuple[str, ...] = ()
    next_action: str = ""
    info: bool = False
    scope: Scope = Scope.CULPRITS
    alternatives: tuple[Alternative, ...] = ()  # other roots that were considered

    def changed(self, **changes: Any) -> Finding:
        """Return a copy of the finding with some fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object in the format of `fr-analyze --json`."""
        shown: dict[str, Any] = {
            "cause": self.cause.value,
            "culprit_ranks": list(self.culprit_ranks),
            "confidence": self.confidence.value,
            "group": self.group,
            "operation": self.operation,
            "sequence": self.sequence,
            "summary": self.summary,
            "evidence": list(self.evidence),
            "fallout_ranks": list(self.fallout_ranks),
            "would_settle": list(self.would_settle),
            "next_action": self.next_action,
            "alternatives": [other.to_json() for other in self.alternatives],
        }
        if self.info:
            shown["severity"] = "info"
        return shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of one analysis. The root finding is the first finding not marked `info`.

    Example:
        >>> report = analyze(incident)
        >>> report.healthy, report.exit_code, report.world_size
        (False, 1, 2)
        >>> report.verdict.cause.value
        'host_hang'
    """

    world_size: int
    ranks_present: tuple[int, ...]
    findings: tuple[Finding, ...]
    origin: str = ""  # what was read, in words
    warnings: tuple[str, ...] = ()
    stacks: tuple[Branch, ...] = ()  # of all ranks merged, in the short form; () when healthy

    @property
    def verdict(self) -> Finding | None:
        """The root finding; None if nothing is wrong."""
        return next((finding for finding in self.findings if not finding.info), None)

    @property
    def healthy(self) -> bool:
        """True if the analysis found nothing wrong."""
        return self.verdict is None

    @property
    def undecided(self) -> bool:
        """True if operations might be stuck even though nothing indicates a fault."""
        return self.healthy and any(one.cause is Cause.UNKNOWN for one in self.findings)

    @property
    def ranks_missing(self) -> tuple[int, ...]:
        """The ranks of the world that left no readable record."""
        present = set(self.ranks_present)
        return tuple(rank for rank in range(self.world_size) if rank not in present)

    @property
    def exit_code(self) -> int:
        """The exit code of `fr-analyze`: 0 if nothing is wrong, and 1 otherwise."""
        return 0 if self.healthy else 1

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `fr-analyze --json` prints."""
        verdict = self.verdict
        return {
            "format": REPORT_FORMAT,
            "healthy": self.healthy,
            "undecided": self.undecided,
            "world_size": self.world_size,
            "ranks_present": list(self.ranks_present),
            "ranks_missing": list(self.ranks_missing),
            "verdict": None if verdict is None else verdict.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def rank_list(ranks: Sequence[int], limit: int = 6) -> str:
    """Format ranks for display: `rank 3`, `ranks 0-6` or `ranks 1, 4 and 9`."""
    if not ranks:
        return "no rank"
    runs = _runs(sorted(set(ranks)))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:limit]]
    if len(runs) > limit:
        shown.append(f"{sum(b - a + 1 for a, b in runs[limit:])} more")
    text = shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"


def _runs(ranks: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return [pair for run in runs for pair in ([run] if run[1] - run[0] != 1 else _pair(run))]


def _pair(run: tuple[int, int]) -> list[tuple[int, int]]:
    return [(run[0], run[0]), (run[1], run[1])]


def rate(bytes_per_s: float) -> str:
    """Format a bandwidth for display: `12.4 GB/s` or `310 MB/s`; `-` if it is unknown."""
    if bytes_per_s <= 0:
        return "-"
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.{0 if bytes_per_s >= 1e7 else 1}f} MB/s"


def seconds(duration_s: float) -> str:
    """Format a duration for display: `840 us`, `31 ms`, `31.2 s` or `4 min 10 s`."""
    if duration_s < 0.001:
        return f"{duration_s * 1e6:.0f} us"
    if duration_s < 1:
        return f"{duration_s * 1e3:.0f} ms"
    if duration_s < 120:
        return f"{duration_s:.1f} s"
    return f"{int(duration_s // 60)} min {int(duration_s % 60)} s"
