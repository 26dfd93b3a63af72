"""Ranks that others wait for and that wait for nobody: here the cause is.

Each sink of the wait-for graph is read by its own signals (`reading.py`); sinks with the same cause
make one finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from echelon.analysis.evidence import RankEvidence
from echelon.analysis.finding import Cause, Finding, rank_list, seconds
from echelon.analysis.picture import Picture, is_inside
from echelon.analysis.rules.outside import keeps_waiting, waiting_ranks, waits_unrecorded
from echelon.analysis.rules.reading import Reading, read_loss, read_rank
from echelon.analysis.rules.signals import innermost_span
from echelon.analysis.waits import Wait

_MISSING = re.compile(r"missing:? (?:ranks? )?(\d{1,7}(?:(?:, | and )\d{1,7})*)")
_ACTIONS = {
    Cause.DATA_STARVATION: "Look at {who}'s data loading{at}: its files, workers and storage.",
    Cause.STORAGE_STALL: "Look at the storage that {who} writes to{at}: space, quota, mount, load.",
    Cause.COMPILE_STALL: "Compile before the first collective, or raise the stall timeout for it.",
    Cause.STORE_WAIT: "Find out which rank was to write the key that {who} waits for{at}.",
    Cause.HOST_HANG: "Look at {who}'s code{at}: what does it wait for there?",
    Cause.GIL_HANG: "Find the C call{at} that holds {who}'s interpreter lock; make it release it.",
    Cause.FROZEN_PROCESS: "Continue {who} (kill -CONT {pid}), or find out who stopped it.",
    Cause.DEAD_PROCESS: "See {who}'s stderr and the machine's log for how its process ended.",
    Cause.SKIPPED_COLLECTIVE: "Give all ranks equally many batches, or let {who} go on to the end.",
    Cause.DEVICE_STUCK: "Look at {who}'s device (its error counters, its log); restart without it.",
    Cause.UNKNOWN: "Take another snapshot a few seconds later.",
}


def find_stuck(picture: Picture) -> list[Finding]:
    """Report the sinks, those with the same cause together, the earliest wait first."""
    sinks = suspects(picture)
    readings = {rank: read_rank(picture, rank) for rank in sinks}
    by_cause: dict[Cause, list[int]] = {}
    for rank, reading in readings.items():
        by_cause.setdefault(reading.cause, []).append(rank)
    findings = [
        _describe(picture, tuple(ranks), readings[_first(picture, ranks)], _first(picture, ranks))
        for ranks in by_cause.values()
    ]
    began = {f.culprit_ranks: _began(picture, f.culprit_ranks) for f in findings}
    return sorted(findings, key=lambda f: (began[f.culprit_ranks], f.culprit_ranks))


def find_lost(picture: Picture) -> list[Finding]:
    """Report the ranks whose node was lost, where that was the first failure.

    The others may still have been at work when they were looked at, each at another moment: what
    seems to wait or to be stuck there is an accident of that.
    """
    incident, size = picture.evidence.incident, picture.evidence.world_size
    lost = tuple(rank for rank in incident.lost if rank < size)
    if not lost:
        return []
    finding = _describe(picture, lost, read_loss(picture, lost[0]), lost[0])
    others = tuple(rank for rank in picture.evidence.ranks if rank not in lost)
    return [finding.changed(fallout_ranks=others)]


def suspects(picture: Picture) -> tuple[int, ...]:
    """Return the ranks to look at: the sinks, or in a silent stall every rank that runs.

    A rank that is itself inside an operation with all its members waits for the transport; while
    another rank sits in no operation at all, that one comes first. A rank that is inside what its
    peers have completed waits for its own device. Before there is a group, ranks meet at the store:
    those that are there wait for those that are not.
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
        if facts.host.alive is not False and not is_inside(facts)
    ]
    apart = keeps_waiting(picture)
    if apart:
        return apart
    elsewhere = [rank for rank in running if not _is_at_store(picture.evidence.ranks[rank])]
    return tuple(elsewhere or running)


def accused(picture: Picture) -> tuple[int, ...]:
    """Return the ranks that others' timeouts name as missing, and that did not end of themselves.

    Before there is a group nobody waits in an operation: only these errors say who did not come.
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
    """Tell whether the peers have completed what these ranks are inside, and not just now.

    In foreign dumps, which do not say when they were made, a few ranks may simply have been dumped
    earlier: then most peers must be through and wait in a later operation already, or the
    operation must have been given up. Over a dead link, one side may complete what the other never
    receives: that is the network's fault.
    """
    if wait.absent or not wait.completed or picture.is_cut_off(wait):
        return False
    if not picture.evidence.foreign or wait.gave_up:
        return True
    wanted = picture.graph.wanted.issuperset(wait.waiting)
    return wanted and len(wait.completed) > len(wait.waiting)


def _first(picture: Picture, ranks: Sequence[int]) -> int:
    return min(ranks, key=lambda rank: (_began(picture, (rank,)), rank))


def _began(picture: Picture, ranks: Sequence[int]) -> int:
    wait = picture.wait_for(ranks)
    return wait.since_ns if wait is not None else 1 << 62


def _describe(picture: Picture, ranks: tuple[int, ...], reading: Reading, shown: int) -> Finding:
    wait = picture.wait_for(ranks)
    who = rank_list(ranks)
    summary = f"rank {shown} {reading.words}"
    if len(ranks) > 1:
        rest = [rank for rank in ranks if rank != shown]
        summary += f" (and so {'does' if len(rest) == 1 else 'do'} {rank_list(rest)})"
    lines = list(reading.evidence)
    for other in [rank for rank in ranks if rank != shown][:4]:
        lines += read_rank(picture, other).evidence[:1]
    fallout = picture.fallout(ranks)
    if set(ranks) <= set(keeps_waiting(picture)):
        fallout = waiting_ranks(picture)
        lines.append(f"{rank_list(fallout)} wait for peers, by what the kernel shows")
    if wait is not None:
        summary += f"; {waiting_words(picture, ranks, wait)}"
        lines.append(wait_line(wait))
    facts = picture.evidence.ranks.get(shown)
    action = reading.action or _ACTIONS.get(reading.cause, _ACTIONS[Cause.DEAD_PROCESS])
    action = action.format(
        who=who,
        at=f" at {reading.frame}" if reading.frame else "",
        pid=facts.identity.pid if facts else 0,
    )
    settles = reading.would_settle
    if picture.evidence.foreign and len(ranks) > 1:
        settles += (f"which of {who} waits for another in a send or receive: Gloo records neither",)
    alike = reading.cause is Cause.UNKNOWN and len(ranks) > 1  # nothing singles one out
    if alike:
        settles += ("what sets one rank apart: all of them are alike, and none waits for another",)
    return Finding(
        cause=reading.cause,
        culprit_ranks=() if alike else ranks,
        confidence=reading.confidence,
        group=wait.group if wait else None,
        operation=wait.operation if wait else None,
        sequence=wait.number if wait else None,
        summary=summary,
        evidence=tuple(lines),
        fallout_ranks=fallout,
        would_settle=settles,
        next_action=action,
    )


def waiting_words(picture: Picture, ranks: Sequence[int], wait: Wait) -> str:
    """Say how many ranks wait for `ranks`, where, and for how long."""
    waiting = picture.graph.fallout(ranks)
    one = len(waiting) == 1
    number = f"rank {waiting[0]}" if one else f"{len(waiting)} ranks"
    whom = "it" if len(ranks) == 1 else "them"
    age_s = picture.waited_s(wait)
    if age_s >= 0.001:
        return f"{number} {'has' if one else 'have'} waited {seconds(age_s)} for {whom} in {wait}"
    return f"{number} {'waits' if one else 'wait'} for {whom} in {wait}"


def wait_line(wait: Wait) -> str:
    """Say who is inside an operation and who has not come."""
    return (
        f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}', "
        f"{rank_list(wait.absent)} not"
    )
