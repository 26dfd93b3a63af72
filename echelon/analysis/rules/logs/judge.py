"""Diagnose a job from its ranks' logs alone.

A root cause is an uncaught exception, a known error message, or a launcher's report that a signal
killed the rank. If ranks logged only consequences of a failure elsewhere, the suspects are the
ranks that missed a barrier, fell behind or logged nothing. Logs cannot show that a job is healthy,
because a hung job logs nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import Frame, last_traceback
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.rules.endings.ended import exit_words
from echelon.analysis.rules.endings.errors import Meaning, meaning_of, watchdog_timeout
from echelon.analysis.sources.logs.messages import MESSAGES, Message, Role, Said, messages_in

_MEANINGS = {
    Meaning.OWN: Cause.EXCEPTION,
    Meaning.MEMORY: Cause.OUT_OF_MEMORY,
    Meaning.DEVICE: Cause.DEVICE_STUCK,
}
# Of two kinds of trouble of one rank, the earlier in this list is nearer to the root.
_DEPTH = (
    Cause.OP_MISMATCH,
    Cause.OUT_OF_MEMORY,
    Cause.DEVICE_STUCK,
    Cause.NETWORK,
    Cause.EXCEPTION,
    Cause.DEAD_PROCESS,
)
_BARRIER = re.compile(r"Ranks? (\d{1,7}(?:, \d{1,7})*) failed to pass monitoredBarrier")
_KILLED_PID = re.compile(r"[Kk]illed process (\d{1,10})")
_LOST = frozenset({"connection-lost", "nccl-remote", "ib-retries"})
_MAX_LINES = 6
_HEAD = "Traceback (most recent call last)"
_MAX_TRACEBACK = 100  # lines
_MAX_AFTER = 200  # lines that a rank may still write after the event that ended it
_MAX_SHOWN = 200
_ASK_DUMPS = (
    "the ranks' own records: run under `echelon run`, or set TORCH_NCCL_TRACE_BUFFER_SIZE=2000"
)
_ASK_EXITS = "how each rank ended: the launcher's or the scheduler's own log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """A root cause logged by one rank."""

    rank: int  # -1: the log names no rank
    cause: Cause
    words: str
    kind: str  # equal for troubles of one kind
    advice: str = ""
    frame: Frame | None = None
    is_old: bool = False  # much was written after it, so the rank continued


def find_in_logs(picture: Picture) -> list[Finding]:
    """Return a single finding, whose cause is `unknown` if the logs do not show a cause."""
    evidence = picture.evidence
    said = {rank: tuple(messages_in(f.host.stderr_tail)) for rank, f in evidence.ranks.items()}
    job = tuple(messages_in(evidence.job_log))
    troubles = [
        trouble
        for rank, facts in evidence.ranks.items()
        if (trouble := _own_trouble(facts, said[rank])) is not None
    ]
    troubles = _with_killed(picture, troubles, job)
    if troubles:
        return [_root(picture, troubles, said)]
    outside = [one for one in job if one.message.role is Role.ROOT]
    if outside:
        one = outside[0]
        words = f"no rank's log explains it; the job's says: {_shown(one.line)}"
        return [_of_the_job(picture, one.message.cause, words, one.message.advice, said)]
    raised = _by_traceback(-1, evidence.job_log)
    if raised is not None:
        return [_of_the_job(picture, raised.cause, raised.words, raised.advice, said)]
    return [_followed(picture, said, job) or _nothing(picture)]


def advice_in(text: str) -> str:
    """Return the last line that reports a known root cause, followed by the remedy; "" if none."""
    found = [one for one in messages_in(text) if one.message.role is Role.ROOT]
    return f"{_shown(found[-1].line)} ({found[-1].message.advice})" if found else ""


def _own_trouble(facts: RankEvidence, said: Sequence[Said]) -> Trouble | None:
    roots = [one for one in said if one.message.role is Role.ROOT]
    found = [_by_message(facts.rank, one) for one in roots]
    raised = _by_traceback(facts.rank, facts.host.stderr_tail)
    if raised is not None:
        found.append(raised)
    if facts.host.oom_kill:
        words = f"rank {facts.rank} ended by the kernel's out-of-memory killer"
        advice = next(one.advice for one in MESSAGES if one.name == "kernel-oom")
        cause = Cause.OUT_OF_MEMORY
        found.append(Trouble(rank=facts.rank, cause=cause, words=words, kind="oom", advice=advice))
    if not found and _died_alone(facts, said):
        words = f"rank {facts.rank} ended {exit_words(facts.host.exit_code or 0)}"
        found.append(
            Trouble(rank=facts.rank, cause=Cause.DEAD_PROCESS, words=words, kind=words[-10:])
        )
    return min(found, key=lambda one: (one.is_old, _DEPTH.index(one.cause)), default=None)


def _by_message(rank: int, said: Said) -> Trouble:
    message = said.message
    words = f"rank {rank}'s log says: {_shown(said.line)}"
    return Trouble(
        rank=rank,
        cause=message.cause,
        words=words,
        kind=message.name,
        advice=message.advice,
        is_old=said.num_after > _MAX_AFTER,
    )


def _by_traceback(rank: int, text: str) -> Trouble | None:
    """Return the root cause that a log's last traceback shows, or None if it blames other ranks.

    Args:
        rank: the rank that wrote the log; -1 if unknown.
    """
    raised = last_traceback(text)
    if raised is None or raised.type in ("SystemExit", "KeyboardInterrupt"):
        return None
    files = "\n".join(frame.file for frame in raised.frames)
    message = f"{raised.message}\n{raised.rest}"
    meaning = meaning_of(raised.type, message, (), files)
    if meaning is Meaning.CONSEQUENCE:
        return None
    first = raised.message.splitlines()[0] if raised.message else ""
    name = raised.type.rpartition(".")[2]
    place = f" ({raised.frame})" if raised.frame else ""
    said = f"{name}: {_shown(first)}" if first else name
    return Trouble(
        rank=rank,
        cause=_MEANINGS[meaning],
        words=f"{f'rank {rank}' if rank >= 0 else 'a rank'} raised {said}{place}",
        kind=f"{name} {raised.frame}",
        advice=f"Fix the exception{f' at {raised.frame}' if raised.frame else ''}.",
        frame=raised.frame,
        is_old=text.count("\n", max(0, text.rfind(_HEAD))) > _MAX_TRACEBACK + _MAX_AFTER,
    )


def _died_alone(facts: RankEvidence, said: Sequence[Said]) -> bool:
    """Return whether a rank exited with an error and logged no sign of a cause outside the rank."""
    code = facts.host.exit_code
    if not code or code in (-15, 143, -2, 130):
        return False
    return not any(one.message.role is Role.CONSEQUENCE for one in said)


def _with_killed(picture: Picture, troubles: list[Trouble], job: Sequence[Said]) -> list[Trouble]:
    """Add a root cause for each rank that the kernel's log reports as killed for lack of memory.

    The new cause replaces any other root cause of the same rank.
    """
    pids = {facts.identity.pid: rank for rank, facts in picture.evidence.ranks.items()}
    for one in job:
        match = _KILLED_PID.search(one.line)
        rank = pids.get(int(match[1]), -1) if match else -1
        if rank >= 0 and one.message.name == "kernel-oom":
            troubles = [other for other in troubles if other.rank != rank]
            troubles.append(_by_message(rank, one))
    return troubles


def _root(picture: Picture, troubles: list[Trouble], said: dict[int, tuple[Said, ...]]) -> Finding:
    """Choose the root from the causes that the ranks logged."""
    ranks = picture.evidence.ranks
    first = picture.evidence.incident.ended
    told = [one for one in troubles if one.rank in first]
    kinds = Counter(one.kind for one in troubles)
    depth = min((one.is_old, _DEPTH.index(one.cause)) for one in troubles)
    deepest = [one for one in troubles if (one.is_old, _DEPTH.index(one.cause)) == depth]
    root = told[0] if told and told[0] in deepest else deepest[0]
    same = [one for one in troubles if one.kind == root.kind]
    is_told = bool(told) and told[0] is root and len(deepest) == 1
    culprits = (root.rank,) if is_told else tuple(one.rank for one in same)
    sure = (len(kinds) == 1 or is_told) and not root.is_old
    known = all(ranks[rank].host.exit_code is not None for rank in culprits)
    confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
    if sure and known and len(culprits) == 1:
        confidence = Confidence.CERTAIN
    others = [one for one in troubles if one not in same]
    settles = () if known else (_ASK_EXITS,)
    if others and not sure:
        settles = (f"which came first: {rank_list([o.rank for o in others])} had other trouble",)
    rest = [rank for rank in culprits if rank != root.rank]
    summary = root.words + (f"; so did {rank_list(rest)}" if rest else "")
    return Finding(
        cause=root.cause,
        culprit_ranks=culprits,
        confidence=confidence,
        summary=summary,
        evidence=tuple(
            dict.fromkeys(
                (
                    *(one.words for one in (root, *others, *same)[:_MAX_LINES]),
                    *_exit_lines(picture, culprits),
                    *_consequences(said, culprits),
                )
            )
        ),
        fallout_ranks=tuple(rank for rank in ranks if rank not in culprits),
        would_settle=settles,
        next_action=root.advice or f"See rank {root.rank}'s log, and the machine's (dmesg).",
    )


def _of_the_job(
    picture: Picture, cause: Cause, words: str, advice: str, said: dict[int, tuple[Said, ...]]
) -> Finding:
    """Report a failure that the log attributes to the job, not to a rank."""
    return Finding(
        cause=cause,
        culprit_ranks=(),
        confidence=Confidence.LIKELY,
        summary=words,
        evidence=(f"in the job's log: {words}", *_consequences(said, ())),
        fallout_ranks=tuple(picture.evidence.ranks),
        would_settle=("which rank it was: the scheduler's list of nodes and tasks",),
        next_action=advice,
    )


def _followed(
    picture: Picture, said: dict[int, tuple[Said, ...]], job: Sequence[Said]
) -> Finding | None:
    """Suspect the ranks that missed a barrier, fell behind, or logged nothing."""
    spoke = {rank: found for rank, found in said.items() if found}
    everything = [*job, *(one for found in spoke.values() for one in found)]
    if not everything:
        return None
    ranks = tuple(spoke)
    message = _commonest(spoke) or job[0].message
    suspects = (
        _by_barrier(everything) or _behind(picture) or _silent(picture, ranks, message)
    ) or _Suspects(
        (),
        message.cause,
        Confidence.POSSIBLE,
        f"{rank_list(ranks)} report{'s' if len(ranks) == 1 else ''} trouble that came from "
        "elsewhere, and no log shows where it began",
    )
    who = rank_list(suspects.ranks)
    look = f"Look at how {who} ended, or at its stack if it is still running."
    return Finding(
        cause=suspects.cause,
        culprit_ranks=suspects.ranks,
        confidence=suspects.confidence,
        summary=suspects.words,
        evidence=(
            *suspects.lines,
            *_consequences(said, ()),
            *(f"in the job's log: {_shown(one.line)}" for one in job[:2]),
        ),
        fallout_ranks=tuple(rank for rank in ranks if rank not in suspects.ranks),
        would_settle=(_ASK_EXITS, _ASK_DUMPS),
        next_action=look if suspects.ranks else message.advice,
    )


@dataclass(frozen=True, slots=True)
class _Suspects:
    """The ranks that are suspected on the basis of the job's logs."""

    ranks: tuple[int, ...]
    cause: Cause
    confidence: Confidence
    words: str
    lines: tuple[str, ...] = ()


def _commonest(spoke: dict[int, tuple[Said, ...]]) -> Message | None:
    counted = Counter(one.message for found in spoke.values() for one in found)
    return counted.most_common(1)[0][0] if counted else None


def _silent(picture: Picture, spoke: tuple[int, ...], message: Message) -> _Suspects | None:
    """Suspect the few ranks that logged nothing while all other ranks logged something."""
    silent = tuple(rank for rank in range(picture.evidence.world_size) if rank not in spoke)
    if not silent or 2 * len(silent) > len(spoke):
        return None
    is_lost = message.name in _LOST
    return _Suspects(
        silent,
        Cause.DEAD_PROCESS if is_lost else Cause.HOST_HANG,
        Confidence.LIKELY if len(silent) == 1 else Confidence.POSSIBLE,
        f"{rank_list(spoke)} {'lost a peer' if is_lost else 'waited in vain'}, and "
        f"{rank_list(silent)} logged nothing",
    )


def _by_barrier(said: Sequence[Said]) -> _Suspects | None:
    """Return the ranks that torch's monitored barrier names as missing."""
    for one in said:
        match = _BARRIER.search(one.line)
        if match is not None:
            ranks = tuple(sorted({int(rank) for rank in match[1].split(", ")}))
            words = f"{rank_list(ranks)} did not reach a barrier in which the others waited"
            return _Suspects(ranks, Cause.HOST_HANG, Confidence.LIKELY, words)
    return None


def _behind(picture: Picture) -> _Suspects | None:
    """Return the ranks whose watchdogs timed out in an operation other than the most common one."""
    gave_up = {
        rank: told
        for rank, facts in picture.evidence.ranks.items()
        if (told := watchdog_timeout(facts.host.stderr_tail)) is not None
    }
    votes = Counter(gave_up.values()).most_common(2)
    if len(votes) < 2 or votes[0][1] == votes[1][1]:
        return None
    number, kind = most = votes[0][0]
    apart = tuple(rank for rank, told in gave_up.items() if told != most)
    lines = tuple(
        f"rank {rank}'s watchdog timed out in {its_kind} #{its_number}"
        for rank, (its_number, its_kind) in sorted(
            gave_up.items(), key=lambda one: (one[1] == most, one[0])
        )
    )
    words = f"{rank_list(apart)} waited in another operation than the others, {kind} #{number}"
    return _Suspects(apart, Cause.UNKNOWN, Confidence.POSSIBLE, words, lines[:_MAX_LINES])


def _nothing(picture: Picture) -> Finding:
    ranks = tuple(picture.evidence.ranks)
    return Finding(
        cause=Cause.UNKNOWN,
        culprit_ranks=(),
        confidence=Confidence.POSSIBLE,
        summary=f"the logs of {rank_list(ranks)} contain no known failure message; a job that "
        "hangs writes none",
        evidence=(f"read {picture.evidence.origin}",),
        would_settle=(_ASK_EXITS, _ASK_DUMPS),
        next_action="If the job is running without progress, dump its ranks' stacks (py-spy dump).",
    )


def _consequences(said: dict[int, tuple[Said, ...]], culprits: tuple[int, ...]) -> tuple[str, ...]:
    """Quote one line per kind of message that reports a consequence; skip the culprits' logs."""
    lines: dict[str, str] = {}
    for rank, found in said.items():
        for one in found if rank not in culprits else ():
            if one.message.role is Role.CONSEQUENCE:
                lines.setdefault(one.message.name, f"rank {rank} reports: {_shown(one.line)}")
    return tuple(lines.values())[:_MAX_LINES]


def _exit_lines(picture: Picture, culprits: tuple[int, ...]) -> list[str]:
    ranks = picture.evidence.ranks
    return [
        f"rank {rank} ended {exit_words(code)}"
        for rank in culprits[:_MAX_LINES]
        if (code := ranks[rank].host.exit_code) is not None
    ]


def _shown(line: str) -> str:
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"
