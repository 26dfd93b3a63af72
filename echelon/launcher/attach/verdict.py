"""Turn two examinations of a job into a verdict.

The rules of `fr-analyze` expect a job in which no rank is making progress. With `--attach`, a user
can examine a job at any time. This module therefore first determines whether the job is making
progress, and then whether the cause could be on another machine. The confidence of a verdict is
limited, because the two examinations are usually only a few seconds apart.
"""

from __future__ import annotations

from pathlib import Path

from echelon.analysis.diagnose import analyze
from echelon.analysis.finding import Cause, Confidence, Finding, Report, rank_list, seconds
from echelon.launcher.attach.look import Sighting

_LONG_GAP_S = 30.0
_SEEN_DIRECTLY = frozenset({Cause.FROZEN_PROCESS, Cause.DEAD_PROCESS, Cause.GIL_HANG})

_OPEN = frozenset(
    {Cause.SKIPPED_COLLECTIVE, Cause.UNKNOWN}
)  # causes that stacks alone cannot decide


def judge(sighting: Sighting, folder: Path, world_size: int) -> Report:
    """Return the report that explains the result of an examination.

    Args:
        folder: the folder to which `look.keep` wrote the result.

    Raises:
        DumpFormatError: the files in `folder` cannot be read.
    """
    present = tuple(sorted(record.identity.rank for record in sighting.records))
    origin = f"{rank_list(present)} of {world_size}, two looks {seconds(sighting.gap_s)} apart"
    if sighting.moves:
        return Report(
            world_size=world_size,
            ranks_present=present,
            findings=(),
            origin=f"{origin}: the job makes progress",
            warnings=sighting.notes,
        )
    if sighting.ended:
        return Report(
            world_size=world_size,
            ranks_present=present,
            findings=(_ended(sighting, present),),
            origin=origin,
            warnings=sighting.notes,
        )
    absent = tuple(rank for rank in range(world_size) if rank not in present)
    report = analyze(folder)
    findings = tuple(_bounded(one, sighting, absent) for one in report.findings)
    if absent and present and set(present) <= set(sighting.waiting):
        findings = (_elsewhere(sighting, present, absent),)
    root = report.verdict
    if sighting.left and not absent and root is not None and root.cause in _OPEN:
        findings = (_bounded(_left(sighting, present), sighting, absent),)
    return Report(
        world_size=world_size,
        ranks_present=present,
        findings=findings,
        origin=origin,
        warnings=(*sighting.notes, *report.warnings),
        stacks=report.stacks,
    )


def _ended(sighting: Sighting, present: tuple[int, ...]) -> Finding:
    """Return the finding for a job in which ranks ended during the examination."""
    ended = tuple(sorted(sighting.ended))
    left = tuple(rank for rank in present if rank not in sighting.ended)
    waiting = tuple(rank for rank in left if rank in sighting.waiting)
    is_dead = bool(waiting) and waiting == left and not sighting.is_watched
    who = rank_list(ended)
    ends: dict[str, list[int]] = {}
    for rank in ended:
        ends.setdefault(sighting.ended[rank], []).append(rank)
    lines = tuple(f"{rank_list(ranks)}: {how}" for how, ranks in ends.items() if how)
    rest = f"; {rank_list(left)} still {'runs' if len(left) == 1 else 'run'}" if left else ""
    if is_dead:
        rest = f" and {rank_list(waiting)} {'waits' if len(left) == 1 else 'wait'} in a collective"
    pronoun = "it was being" if len(ended) == 1 else "they were being"
    return Finding(
        cause=Cause.DEAD_PROCESS if is_dead else Cause.UNKNOWN,
        culprit_ranks=ended if is_dead else (),
        confidence=Confidence.LIKELY if is_dead else Confidence.POSSIBLE,
        summary=f"{who} ended while {pronoun} examined{rest}",
        evidence=lines,
        fallout_ranks=waiting if is_dead else (),
        would_settle=("the output of the job's launcher: which rank failed first, and how",),
        next_action=f"Read the output of {who}; fr-analyze LOGDIR reads the logs of all ranks.",
    )


def _left(sighting: Sighting, present: tuple[int, ...]) -> Finding:
    """Return the finding for ranks that have left a loop while other ranks are still inside it."""
    behind = tuple(sorted(one.rank for one in sighting.left))
    within = tuple(rank for rank in present if rank not in behind)
    first = sighting.left[0]
    culprits, fallout = (behind, within) if len(behind) <= len(within) else (within, behind)
    return Finding(
        cause=Cause.SKIPPED_COLLECTIVE,
        culprit_ranks=culprits,
        confidence=Confidence.LIKELY,
        summary=f"{rank_list(behind)} left the loop at {first.loop} and "
        f"{'waits' if len(behind) == 1 else 'wait'} in a collective at {first.behind}; "
        f"{rank_list(within)} {'is' if len(within) == 1 else 'are'} still in it",
        evidence=tuple(
            f"rank {one.rank} is at {one.behind}, after the loop at {one.loop}; rank {one.other} "
            f"is inside it, at {one.within}"
            for one in sighting.left[:4]
        ),
        fallout_ranks=fallout,
        would_settle=("how many batches each rank had",),
        next_action="Give all ranks the same number of batches, or let all leave together.",
    )


def _elsewhere(sighting: Sighting, present: tuple[int, ...], absent: tuple[int, ...]) -> Finding:
    """Return the finding for a job in which some ranks are missing and all others are waiting."""
    who = rank_list(absent)
    waits = f"{rank_list(present)} in a collective at both looks, {seconds(sighting.gap_s)} apart"
    if not sighting.is_whole:
        return Finding(
            cause=Cause.UNKNOWN,
            culprit_ranks=(),
            confidence=Confidence.POSSIBLE,
            summary="all ranks of this machine wait in a collective, perhaps for other machines: "
            f"{who}",
            evidence=(waits, f"{who}: no process on this machine"),
            fallout_ranks=present,
            would_settle=(f"the same look at the machines of {who} (--host)",),
            next_action="Run it again with --host and the other machines' names.",
        )
    if sighting.is_watched:
        return Finding(
            cause=Cause.SKIPPED_COLLECTIVE,
            culprit_ranks=absent,
            confidence=Confidence.LIKELY,
            summary=f"{who} ended while {rank_list(present)} wait in a collective: fewer of them "
            "were called there",
            evidence=(
                waits,
                f"{who}: its process has ended; its launcher, which stops at a failure, has not",
            ),
            fallout_ranks=present,
            would_settle=("how many batches each rank had",),
            next_action="Give all ranks the same number of batches, or let all leave together.",
        )
    return Finding(
        cause=Cause.DEAD_PROCESS,
        culprit_ranks=absent,
        confidence=Confidence.LIKELY,
        summary=f"{who} is gone while {rank_list(present)} wait in a collective",
        evidence=(waits, f"{who}: no process on this machine, where the whole world runs"),
        fallout_ranks=present,
        would_settle=(f"the exit status of {who}",),
        next_action=f"Look at the output of {who} and the machine's log (dmesg).",
    )


def _bounded(finding: Finding, sighting: Sighting, absent: tuple[int, ...]) -> Finding:
    """Limit a finding's confidence, because a long step can look like a hang."""
    if finding.cause in _SEEN_DIRECTLY or finding.info:
        return finding
    moved = [rank for rank in finding.culprit_ranks if rank in sighting.changed]
    missing: list[str] = []
    sure = finding.confidence
    if moved:
        sure = Confidence.POSSIBLE
        missing.append(
            f"whether {rank_list(moved)} arrives: it was elsewhere in the second snapshot"
        )
    elif sighting.gap_s < _LONG_GAP_S and sure is Confidence.CERTAIN:
        sure = Confidence.LIKELY
        missing.append("whether it lasts: look again with --wait 60")
    if absent:
        missing.append(f"what {rank_list(absent)}, not on this machine, do (--host)")
    return finding.changed(confidence=sure, would_settle=(*finding.would_settle, *missing))
