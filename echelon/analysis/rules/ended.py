"""Ranks that ended, and why: an exception of their own, too little memory, a death.

The errors that our own collectives and torch's transports raise when a peer is gone are evidence
about that peer, never the root. What the agent ended itself is fallout.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from echelon.analysis.evidence import RankEvidence
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list, seconds
from echelon.analysis.picture import Picture, last_row
from echelon.analysis.stacks import Frame, last_traceback, short_site, site_frame

_OWN_ERRORS = ("echelon.errors.",)
_OWN_NAMES = frozenset(
    {
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "PeerLostError",
        "StoreError",
        "StoreTimeoutError",
        "StoreConnectionError",
    }
)
_TORCH_TRANSPORT = (
    "DistNetworkError",
    "DistBackendError",
    "DistStoreError",
)
_TRANSPORT_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport/",
    "connectfullmesh",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "timed out waiting",
)
_ASKED = frozenset({-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM})
_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError")
_MEMORY_WORDS = (
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "cannot allocate memory",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one rank ended, as far as it was its own doing."""

    rank: int
    cause: Cause
    order: tuple[int, int]  # earlier endings are smaller
    how: str  # what is equal for endings of one kind
    words: str
    frame: Frame | None
    evidence: tuple[str, ...]
    certain: bool


def find_ended(picture: Picture) -> list[Finding]:
    """Report ranks that ended of themselves: memory first, then the earliest ending."""
    endings = [
        ending
        for facts in picture.evidence.ranks.values()
        if (ending := ending_of(picture, facts)) is not None
    ]
    memory = [ending for ending in endings if ending.cause is Cause.OUT_OF_MEMORY]
    others = [ending for ending in endings if ending.cause is not Cause.OUT_OF_MEMORY]
    ordered = sorted(memory, key=lambda e: e.order) + sorted(others, key=lambda e: e.order)
    if not ordered:
        return []
    alike: dict[tuple[object, ...], list[Ending]] = {}
    for ending in ordered[1:]:
        alike.setdefault((ending.cause, ending.frame, ending.how), []).append(ending)
    return [_describe(picture, ordered[0]), *(_later(picture, ends) for ends in alike.values())]


def _later(picture: Picture, endings: list[Ending]) -> Finding:
    """Report endings of one kind that came after the root: a thousand of them are one finding."""
    first = _describe(picture, endings[0])
    if len(endings) == 1:
        return first
    ranks = tuple(sorted(ending.rank for ending in endings))
    rest = [rank for rank in ranks if rank != endings[0].rank]
    return first.changed(
        culprit_ranks=ranks,
        summary=f"{endings[0].words}; {rank_list(rest)} ended alike",
        fallout_ranks=picture.fallout(ranks),
    )


def ending_of(picture: Picture, facts: RankEvidence) -> Ending | None:
    """Say how a rank ended; None if it runs, ended well, or ended because of others."""
    host = facts.host
    raised = _raised(facts)
    if host.stopped_by_agent or (host.alive and raised is None):
        return None
    if raised is not None:
        type_name, message, frame, bases = raised
        if is_secondary(type_name, message, bases):
            return None
        if type_name.rpartition(".")[2] == "KeyboardInterrupt" and _was_asked_to_end(picture):
            return None
        cause = Cause.OUT_OF_MEMORY if is_memory(type_name, message, bases) else Cause.EXCEPTION
        return _by_exception(facts, cause, type_name, message, frame)
    if host.exit_code is None:
        return None
    if host.exit_code == 0:
        return None  # whether it left too early is for the waits to say
    if host.exit_code in _ASKED and _was_asked_to_end(picture):
        return None
    return _by_death(facts)


def _was_asked_to_end(picture: Picture) -> bool:
    """Tell whether somebody stopped the job, so that its ranks' interrupts are no fault."""
    return picture.evidence.incident.kind == "signal"


def _raised(facts: RankEvidence) -> tuple[str, str, Frame | None, tuple[str, ...]] | None:
    """Return what a rank raised: from its own record, else from the last traceback on stderr.

    An abort may follow an exception: libraries whose threads still run end the process with it.
    """
    words = facts.last_words
    if words is not None:
        return words.type, words.message, site_frame(words.site), words.bases
    code = facts.host.exit_code
    if not code or (code < 0 and code != -signal.SIGABRT):
        return None
    found = last_traceback(facts.host.error_file) or last_traceback(facts.host.stderr_tail)
    if found is None or found.type == "SystemExit":
        return None
    return found.type, found.message, found.frame, ()


def is_secondary(type_name: str, message: str, bases: tuple[str, ...] = ()) -> bool:
    """Tell an error that only reports what a peer or the network did."""
    name = type_name.rpartition(".")[2]
    if any(kind.startswith(_OWN_ERRORS) for kind in (type_name, *bases)) or name in _OWN_NAMES:
        return True
    if name in _TORCH_TRANSPORT:
        return True
    if name == "RuntimeError" and any(f"{own}: " in message for own in _OWN_NAMES):
        return True  # ours, on its way through torch's C++
    words = message.lower()
    return name in ("RuntimeError", "ConnectionError", "ConnectionResetError") and any(
        text in words for text in _TRANSPORT_WORDS
    )


def is_memory(type_name: str, message: str, bases: tuple[str, ...] = ()) -> bool:
    """Tell an error that says memory, of the host or of a device, is used up."""
    names = [kind.rpartition(".")[2] for kind in (type_name, *bases)]
    if any(name in _MEMORY_TYPES for name in names):
        return True
    words = message.lower()
    return "RuntimeError" in names and any(text in words for text in _MEMORY_WORDS)


def _by_exception(
    facts: RankEvidence, cause: Cause, type_name: str, message: str, frame: Frame | None
) -> Ending:
    short = type_name.rpartition(".")[2]
    first = message.splitlines()[0] if message else ""
    said = f"{short}: {first}" if first else short
    place = f" ({frame})" if frame else ""
    lines = [f"rank {facts.rank} raised {said}{place}"]
    if facts.host.exit_code is not None:
        lines.append(f"rank {facts.rank} ended {exit_words(facts.host.exit_code)}")
    if facts.last_words is not None and facts.last_words.traceback:
        tail = [line for line in facts.last_words.traceback.splitlines() if line.strip()][-3:]
        lines.append("its traceback ends: " + " | ".join(line.strip() for line in tail))
    return Ending(
        rank=facts.rank,
        cause=cause,
        order=_order(facts),
        how=short,
        words=f"rank {facts.rank} raised {said}{place}",
        frame=frame,
        evidence=tuple(lines),
        certain=True,
    )


def _by_death(facts: RankEvidence) -> Ending:
    host = facts.host
    code = host.exit_code
    assert code is not None
    cause = Cause.DEAD_PROCESS
    lines = [f"rank {facts.rank} ended {exit_words(code)}"]
    if host.oom_kill and code == -9:
        cause = Cause.OUT_OF_MEMORY
        lines.append(f"rank {facts.rank}: the kernel's out-of-memory killer ended it")
    if host.rss_bytes:
        lines.append(f"rank {facts.rank} had {host.rss_bytes / 2**20:.0f} MiB resident")
    row = last_row(facts)
    where = short_site(facts_site(facts))
    tail = [line for line in host.stderr_tail.splitlines() if line.strip()][-2:]
    if tail:
        lines.append(
            f"rank {facts.rank}'s stderr ends: " + " | ".join(line.strip() for line in tail)
        )
    if row is None and facts.has_ring:
        lines.append(f"rank {facts.rank} had begun no operation")
    words = f"rank {facts.rank} ended {exit_words(code)}"
    if where:
        words += f" inside its span '{facts.open_spans[-1].name}' ({where})"
    return Ending(
        rank=facts.rank,
        cause=cause,
        order=_order(facts),
        how=exit_words(code),
        words=words if cause is Cause.DEAD_PROCESS else f"{words}: out of memory",
        frame=None,
        evidence=tuple(lines),
        certain=True,
    )


def facts_site(facts: RankEvidence) -> str:
    """Return where an ended rank's innermost open span was, "" if none was open."""
    return facts.open_spans[-1].site if facts.open_spans else ""


def _order(facts: RankEvidence) -> tuple[int, int]:
    host = facts.host
    order = host.exit_order if host.exit_order >= 0 else 1 << 30
    moment = host.exited_mono_ns
    if not moment and facts.last_words is not None:
        moment = facts.last_words.mono_ns
    return order, moment + facts.offset_ns


def exit_words(code: int) -> str:
    """Say how a process ended: `by SIGKILL`, `with exit code 3`."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _describe(picture: Picture, ending: Ending) -> Finding:
    evidence = picture.evidence
    wait = picture.wait_for([ending.rank])
    facts = evidence.ranks[ending.rank]
    lines = list(ending.evidence)
    group = operation = None
    sequence = None
    summary = ending.words
    if wait is not None:
        group, operation, sequence = wait.group, wait.operation, wait.number
        waiting = picture.graph.fallout([ending.rank])
        summary += (
            f"; {rank_list(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it in {wait}"
        )
        lines.append(f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}'")
    else:
        row = last_row(facts)
        if row is not None:
            group = evidence.groups[int(row["group"])].name
            operation = evidence.call(row).operation
            sequence = int(row["sequence"] if row["sequence"] >= 0 else row["p2p_sequence"])
            lines.append(
                f"rank {ending.rank} last called {operation} #{sequence} of group '{group}'"
            )
    lines += _reports_of(picture, ending.rank)
    lines += _same_elsewhere(picture, facts)
    return Finding(
        cause=ending.cause,
        culprit_ranks=(ending.rank,),
        confidence=Confidence.CERTAIN if ending.certain else Confidence.LIKELY,
        group=group,
        operation=operation,
        sequence=sequence,
        summary=summary,
        evidence=tuple(lines),
        fallout_ranks=picture.fallout([ending.rank]),
        next_action=_next_action(facts, ending),
    )


def _reports_of(picture: Picture, rank: int) -> list[str]:
    """Quote one error in which another rank says that this one is lost."""
    for other, facts in picture.evidence.ranks.items():
        row = last_row(facts)
        text = picture.evidence.error(row) if row is not None else ""
        if other != rank and ("PeerLost" in text or "Timeout" in text):
            return [f"rank {other} recorded: {text.splitlines()[0]}"]
    return []


def _same_elsewhere(picture: Picture, facts: RankEvidence) -> list[str]:
    """Say which other ranks raised the same exception at the same line: then no rank is special."""
    words = facts.last_words
    if words is None:
        return []
    same = [
        other
        for other, theirs in picture.evidence.ranks.items()
        if other != facts.rank
        and theirs.last_words is not None
        and (theirs.last_words.type, theirs.last_words.site) == (words.type, words.site)
    ]
    return [f"{rank_list(same)} raised the same there, later than this one"] if same else []


def _next_action(facts: RankEvidence, ending: Ending) -> str:
    stderr = f"rank_{facts.rank}/attempt_{facts.identity.attempt}/stderr.log"
    if ending.cause is Cause.OUT_OF_MEMORY:
        return (
            f"Lower the memory that rank {facts.rank} needs (batch, sequence, activations) "
            "or raise its limit."
        )
    if ending.cause is Cause.EXCEPTION:
        place = f" at {ending.frame}" if ending.frame else ""
        return f"Fix the exception{place}; the full traceback is in {stderr}."
    return f"See {stderr} and the machine's log (dmesg) for who ended rank {facts.rank}."


__all__ = [
    "Ending",
    "ending_of",
    "exit_words",
    "find_ended",
    "is_memory",
    "is_secondary",
    "seconds",
]
