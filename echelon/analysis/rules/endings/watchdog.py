"""Detect, from other ranks' stderr, ranks that did not join an operation in time.

Before torch's watchdog ends a process, it logs the operation that timed out. A rank whose watchdog
logged nothing did not join the operation. If Gloo times out on one rank, the other waiting ranks
fail immediately afterward.
"""

from __future__ import annotations

from echelon.analysis.evidence.picture import Picture, has_moved
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list, seconds
from echelon.analysis.rules.endings.errors import gloo_timeout_s, was_cut_by_gloo, watchdog_timeout
from echelon.analysis.rules.one_rank.choice import read_rank
from echelon.analysis.rules.one_rank.outside import waits_for_peers
from echelon.analysis.rules.waits.stuck import describe_sinks

_MAX_LINES = 4


def find_given_up(picture: Picture) -> list[Finding]:
    """Report the ranks that other ranks were waiting for when a watchdog timed out."""
    gave_up = {
        rank: told
        for rank, facts in picture.evidence.ranks.items()
        if (told := watchdog_timeout(facts.host.stderr_tail)) is not None
    }
    if not gave_up:
        return _given_up_by_gloo(picture)
    number, operation = max(gave_up.values())
    lines = tuple(
        f"rank {rank}'s watchdog timed out in {kind} #{at}"
        for rank, (at, kind) in sorted(gave_up.items())[:_MAX_LINES]
    )
    apart = tuple(rank for rank in picture.evidence.ranks if rank not in gave_up)
    behind = apart or tuple(rank for rank, (at, _) in gave_up.items() if at < number)
    if not behind or 2 * len(behind) > picture.evidence.world_size:
        return [_all_gave_up(operation, number, tuple(gave_up), lines)]
    finding = describe_sinks(picture, behind, read_rank(picture, behind[0]), behind[0])
    sure = finding.confidence is Confidence.CERTAIN
    others = tuple(rank for rank in gave_up if rank not in behind)
    return [
        finding.changed(
            confidence=Confidence.LIKELY if sure else finding.confidence,
            operation=operation,
            sequence=number,
            summary=f"{finding.summary}; the watchdogs of {rank_list(others)} timed out in "
            f"{operation} #{number}",
            evidence=(*finding.evidence, *lines),
            fallout_ranks=others,
            scope=Scope.FALLOUT,
        )
    ]


def _given_up_by_gloo(picture: Picture) -> list[Finding]:
    """Report the live ranks outside any collective if Gloo timed out on other ranks."""
    ranks = picture.evidence.ranks
    if picture.graph.waits:  # the records are more precise
        return []
    ended = {rank: facts.host.stderr_tail for rank, facts in ranks.items() if facts.host.exit_code}
    cut = tuple(rank for rank, stderr in ended.items() if was_cut_by_gloo(stderr))
    waited_s = max((gloo_timeout_s(ended[rank]) for rank in cut), default=0.0)
    behind = tuple(
        rank
        for rank, facts in ranks.items()
        if facts.host.alive and not has_moved(facts) and not waits_for_peers(facts)
    )
    if not waited_s or not behind or 2 * len(behind) > picture.evidence.world_size:
        return []
    finding = describe_sinks(picture, behind, read_rank(picture, behind[0]), behind[0])
    sure = finding.confidence is Confidence.CERTAIN
    lines = tuple(f"rank {rank}'s stderr ends with an error of Gloo" for rank in cut[:_MAX_LINES])
    return [
        finding.changed(
            confidence=Confidence.LIKELY if sure else finding.confidence,
            summary=f"{finding.summary}; Gloo timed out on {rank_list(cut)} after "
            f"{seconds(waited_s)} of waiting",
            evidence=(*finding.evidence, *lines),
            fallout_ranks=cut,
            scope=Scope.FALLOUT,
        )
    ]


def _all_gave_up(
    operation: str, number: int, ranks: tuple[int, ...], lines: tuple[str, ...]
) -> Finding:
    return Finding(
        cause=Cause.NETWORK,
        culprit_ranks=(),
        confidence=Confidence.POSSIBLE,
        operation=operation,
        sequence=number,
        summary=f"the watchdogs of {rank_list(ranks)} timed out in {operation} #{number}, and "
        "nothing recorded singles out a rank",
        evidence=lines,
        fallout_ranks=ranks,
        scope=Scope.FALLOUT,
        would_settle=("torch's flight recorder: which ranks had entered the operation",),
        next_action="Run under TORCH_NCCL_TRACE_BUFFER_SIZE=2000 to have torch record operations.",
    )
