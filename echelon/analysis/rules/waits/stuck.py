"""Examine the sinks of the wait-for graph.

A sink is a rank that other ranks wait for but that is not waiting itself. Its own signals show what
it is doing (see `one_rank/`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from echelon.analysis.evidence.matching.waits import Wait
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture, has_moved, is_inside
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list, seconds
from echelon.analysis.rules.one_rank.choice import read_rank
from echelon.analysis.rules.one_rank.device import never_started
from echelon.analysis.rules.one_rank.ending import read_loss
from echelon.analysis.rules.one_rank.outside import (
    keeps_waiting,
    sleepers,
    waiting_ranks,
    waits_unrecorded,
)
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import (
    innermost_span,
    is_busy,
    process_lines,
    users_line,
)

_COMPARED = 64
_MAX_FINDINGS = 64
_MISSING = re.compile(r"missing:? (?:ranks? )?(\d{1,7}(?:(?:, | and )\d{1,7})*)")
_ACTIONS = {
    Cause.DATA_STARVATION: "Look at {who}'s data loading{at}: its files, workers and storage.",
    Cause.STORAGE_STALL: "Look at the storage that {who} writes to{at}: space, quota, mount, load.",
    Cause.COMPILE_STALL: "Compile before the first collective, or raise the stall timeout for it.",
    Cause.STORE_WAIT: "Find out which rank should have written the awaited key{at}.",
    Cause.HOST_HANG: "Look at {who}'s code{at}: {question}?",
    Cause.GIL_HANG: "Find the C call{at} that holds {who}'s interpreter lock; make it release it.",
    Cause.FROZEN_PROCESS: "Continue {who} (kill -CONT {pid}), or find out who stopped it.",
    Cause.DEAD_PROCESS: "See {who}'s stderr and the machine's log for how its process ended.",
    Cause.SKIPPED_COLLECTIVE: "Give all ranks the same number of batches, or let {who} continue.",
    Cause.DEVICE_STUCK: "Look at {who}'s device (its error counters, its log); restart without it.",
    Cause.STRAGGLER: "Find out why {who} is slow{at}; raise the stall timeout if that is expected.",
    Cause.UNKNOWN: "Take another snapshot a few seconds later.",
}


def find_stuck(picture: Picture) -> list[Finding]:
    """Report the sinks of the wait-for graph, ordered by when ranks began to wait for them.

    Sinks that have the same cause and block the same operation are reported as one finding.
    """
    sinks = suspects(picture)
    readings = {rank: read_rank(picture, rank) for rank in sinks}
    alike: dict[tuple[Cause, int], list[int]] = {}
    missing = set(picture.evidence.missing) - set(picture.evidence.incident.absent)
    for rank, reading in readings.items():
        wait = None if rank in missing else picture.wait_for([rank])
        alike.setdefault((reading.cause, 0 if wait is None else id(wait)), []).append(rank)
    alike = _bounded(alike)
    lost = alike.get((Cause.DEAD_PROCESS, 0), [])
    if lost and missing.issuperset(lost):  # ranks without a record may have gone with them
        alike[Cause.DEAD_PROCESS, 0] = sorted(missing)
    findings = [
        describe_sinks(
            picture, tuple(ranks), readings[_first(picture, ranks)], _first(picture, ranks)
        )
        for ranks in alike.values()
    ]
    began = {f.culprit_ranks: _began(picture, f.culprit_ranks) for f in findings}
    return sorted(findings, key=lambda f: (began[f.culprit_ranks], f.culprit_ranks))


def _bounded(alike: dict[tuple[Cause, int], list[int]]) -> dict[tuple[Cause, int], list[int]]:
    """Group the sinks by cause alone if there would otherwise be too many findings."""
    if len(alike) <= _MAX_FINDINGS:
        return alike
    merged: dict[tuple[Cause, int], list[int]] = {}
    for (cause, _), ranks in alike.items():
        merged.setdefault((cause, 0), []).extend(ranks)
    return merged


def find_all_busy(picture: Picture) -> list[Finding]:
    """Report a stall in which all ranks are computing and no rank is waiting.

    A long compilation, evaluation or preprocessing step produces the same evidence.
    """
    evidence = picture.evidence
    ranks = evidence.ranks
    if evidence.incident.kind != "stall" or picture.graph.waits or evidence.missing:
        return []
    if len(ranks) < 2 or not all(is_busy(facts) for facts in ranks.values()):
        return []
    if any(
        read_rank(picture, rank).cause is not Cause.HOST_HANG for rank in list(ranks)[:_COMPARED]
    ):
        return []
    places = {rank: frame for rank, facts in ranks.items() if (frame := users_line(facts))}
    shown = "; ".join(f"rank {rank} at {frame}" for rank, frame in list(places.items())[:3])
    return [
        Finding(
            cause=Cause.UNKNOWN,
            culprit_ranks=(),
            confidence=Confidence.POSSIBLE,
            summary="all ranks compute and none waits for another"
            + (f": {shown}" if shown else ""),
            evidence=tuple(
                line for facts in list(ranks.values())[:4] for line in process_lines(facts)
            ),
            would_settle=("a span around what takes long (compile, evaluation)",),
            next_action="If this is meant to take so long, mark it with a span or raise the "
            "stall timeout; otherwise look at the lines above.",
        )
    ]


def find_lost(picture: Picture) -> list[Finding]:
    """Report the ranks whose node was lost, if the loss was the first failure."""
    incident, size = picture.evidence.incident, picture.evidence.world_size
    lost = tuple(rank for rank in incident.lost if rank < size)
    if not lost:
        return []
    finding = describe_sinks(picture, lost, read_loss(picture, lost[0]), lost[0])
    others = tuple(rank for rank in picture.evidence.ranks if rank not in lost)
    return [finding.changed(fallout_ranks=others, scope=Scope.FALLOUT)]


def suspects(picture: Picture) -> tuple[int, ...]:
    """Return the ranks to examine: sinks of the wait graph or, if it is empty, running ranks.

    Sinks outside any operation are preferred, followed by ranks that are still inside an operation
    although their peers completed it. If the graph is empty, ranks that are named as missing in
    timeout errors are preferred, followed by ranks for which other ranks appear to be waiting.
    """
    sinks = picture.graph.sinks
    inside = {rank for wait in picture.graph.waits if not wait.absent for rank in wait.waiting}
    outside = tuple(
        rank for rank in sinks if rank not in inside and not waits_unrecorded(picture, rank)
    )
    if outside:
        return outside
    left = [wait for wait in picture.graph.waits if is_left_behind(picture, wait)]
    behind = {rank for wait in left for rank in wait.waiting}
    behind.update(rank for wait in picture.graph.waits for rank in never_started(picture, wait))
    if behind:
        return tuple(sorted(behind))
    if picture.graph.waits:
        return ()
    absent = accused(picture)
    if absent or picture.evidence.incident.kind != "stall":
        return absent
    running = [
        rank
        for rank, facts in picture.evidence.ranks.items()
        if (facts.host.alive is not False or facts.host.stopped_by_agent) and not is_inside(facts)
    ]
    running = [rank for rank in running if not has_moved(picture.evidence.ranks[rank])]
    apart = keeps_waiting(picture) or sleepers(picture)
    if apart:
        return apart
    elsewhere = [rank for rank in running if not _is_at_store(picture.evidence.ranks[rank])]
    return tuple(elsewhere or running)


def accused(picture: Picture) -> tuple[int, ...]:
    """Return the ranks that other ranks' timeout errors name as missing.

    Ranks that themselves raised an exception are left out.
    """
    named: set[int] = set()
    for facts in picture.evidence.ranks.values():
        words = facts.last_words
        if words is not None and words.type.endswith("TimeoutError"):
            for match in _MISSING.findall(words.message):
                named |= {int(number) for number in re.findall(r"\d{1,7}", match)}
    ranks = picture.evidence.ranks
    return tuple(
        sorted(r for r in named if r < picture.evidence.world_size
               and (r not in ranks or ranks[r].last_words is None))
    )  # fmt: skip


def _is_at_store(facts: RankEvidence) -> bool:
    span = innermost_span(facts)
    return span is not None and span.name == "store"


def is_left_behind(picture: Picture, wait: Wait) -> bool:
    """Return whether peers completed the operation while the waiting ranks remained in it.

    Differences that can arise because dumps were taken at different times are ignored. The result
    is also False if a link is dead, because one side of the link can complete an operation that the
    other side cannot.
    """
    if wait.absent or not wait.completed or picture.is_cut_off(wait):
        return False
    if not picture.evidence.foreign or wait.gave_up:
        return True
    wanted = picture.graph.wanted.issuperset(wait.waiting)
    enough = len(wait.waiting) if picture.streams is not None else len(wait.waiting) + 1
    return wanted and len(wait.completed) >= enough


def _first(picture: Picture, ranks: Sequence[int]) -> int:
    return min(ranks, key=lambda rank: (_began(picture, (rank,)), rank))


def _began(picture: Picture, ranks: Sequence[int]) -> int:
    wait = picture.wait_for(ranks)
    return wait.since_ns if wait is not None else 1 << 62


def describe_sinks(
    picture: Picture, ranks: tuple[int, ...], reading: Reading, shown: int
) -> Finding:
    """Return a finding about ranks stuck for the same reason, with rank `shown` as the example."""
    wait = picture.wait_for(ranks)
    who = rank_list(ranks)
    summary = f"rank {shown} {reading.words}"
    lines = list(reading.evidence)
    rest = [rank for rank in ranks if rank != shown]
    others = {rank: read_rank(picture, rank) for rank in rest[:_COMPARED]}
    if rest:
        summary += _rest_words(reading, others, rest)
    for other in list(others.values())[:4]:
        lines += other.evidence[:1]
    fallout = picture.fallout(ranks)
    if set(ranks) <= set(keeps_waiting(picture)):
        fallout = waiting_ranks(picture)
        seen = f"{rank_list(fallout)} {'waits' if len(fallout) == 1 else 'wait'} for peers"
        summary += f"; {seen}"
        lines.append(f"{seen}, according to the kernel")
    if wait is not None:
        summary += f"; {waiting_words(picture, ranks, wait)}"
        lines.append(wait_line(wait))
    facts = picture.evidence.ranks.get(shown)
    action = reading.action or _ACTIONS.get(reading.cause, _ACTIONS[Cause.DEAD_PROCESS])
    action = action.format(
        who=who,
        at=f" at {reading.frame}" if reading.frame else "",
        question="why does it take so long there"
        if facts and is_busy(facts)
        else "what does it wait for there",
        pid=facts.identity.pid if facts else 0,
    )
    settles = reading.would_settle
    if picture.evidence.foreign and len(ranks) > 1:
        settles += (f"which of {who} waits for another in a send or receive: Gloo records neither",)
    alike = reading.cause is Cause.UNKNOWN and len(ranks) > 1  # nothing singles out a rank
    if alike:
        settles += ("what distinguishes one rank: nothing in the record does",)
    elif not _has_contrast(picture, ranks):
        settles += (
            "what distinguishes one rank: all ranks look the same, and none waits for another",
        )
    return Finding(
        cause=reading.cause,
        culprit_ranks=() if alike else ranks,
        confidence=_confidence(picture, ranks, reading),
        group=wait.group if wait else None,
        operation=wait.operation if wait else None,
        sequence=wait.number if wait else None,
        summary=summary,
        evidence=tuple(lines),
        fallout_ranks=fallout,
        would_settle=settles,
        next_action=action,
        scope=Scope.SHARED if reading.cause is Cause.DEVICE_STUCK else Scope.CULPRITS,
    )


def _rest_words(reading: Reading, others: Mapping[int, Reading], rest: Sequence[int]) -> str:
    """Describe how a finding's other ranks compare with the rank shown as the example."""
    apart = [r for r, other in others.items() if other.frame != reading.frame and other.frame]
    same = [rank for rank in rest if rank not in apart]
    text = f"; so {'does' if len(same) == 1 else 'do'} {rank_list(same)}" if same else ""
    shown = [f"rank {rank} {others[rank].words}" for rank in apart[:2]]
    if len(apart) > 2:
        shown.append(f"{rank_list(apart[2:])} elsewhere")
    return "; ".join([text, *shown] if text else ["", *shown])


def _has_contrast(picture: Picture, ranks: Sequence[int]) -> bool:
    """Return whether the evidence distinguishes the culprits from other ranks."""
    if picture.evidence.world_size == 1 or picture.wait_for(ranks) is not None:
        return True
    return any(rank not in ranks for rank in range(picture.evidence.world_size))


def _confidence(picture: Picture, ranks: Sequence[int], reading: Reading) -> Confidence:
    return reading.confidence if _has_contrast(picture, ranks) else Confidence.POSSIBLE


def waiting_words(picture: Picture, ranks: Sequence[int], wait: Wait) -> str:
    """Describe how many ranks are waiting for `ranks`, where, and for how long."""
    waiting = picture.graph.fallout(ranks)
    one = len(waiting) == 1
    number = f"rank {waiting[0]}" if one else f"{len(waiting)} ranks"
    whom = "it" if len(ranks) == 1 else "them"
    age_s = picture.waited_s(wait)
    if age_s >= 0.001:
        return f"{number} {'has' if one else 'have'} waited {seconds(age_s)} for {whom} in {wait}"
    return f"{number} {'waits' if one else 'wait'} for {whom} in {wait}"


def wait_line(wait: Wait) -> str:
    """List the ranks inside an operation, and the ranks that have not entered the operation."""
    return (
        f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}', "
        f"{rank_list(wait.absent)} not"
    )
