"""Detect ranks that raised an exception, crashed, were killed or ran out of memory.

A rank whose error reports a lost peer is not at fault, nor is a rank that the launcher terminated.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import numpy as np

from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.evidence.picture import Picture, last_row
from echelon.analysis.evidence.stacks.frames import (
    Frame,
    Raised,
    last_traceback,
    short_site,
    site_frame,
)
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.analysis.rules.endings.errors import (
    Meaning,
    cpp_abort,
    died_by_watchdog,
    is_gloos_exit,
    meaning_of,
)
from echelon.analysis.rules.one_rank.signals import fault_lines
from echelon.recorder.format.schema import State

_ASKED = frozenset({-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM})
_ABORTS = frozenset({-signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGABRT})
_SIGABRT = frozenset({-signal.SIGABRT, 128 + signal.SIGABRT})
LONG_WAIT_S = 30.0  # a rank that aborts after waiting this long for a living rank is a victim
_FULL_SHM = re.compile(r"(?:shared memory|/dev/shm).{0,80}No space left on device")
_TOGETHER_NS = 10 * 10**9  # endings this close together may share one shortage of memory
_ORIGINAL = "Original Traceback (most recent call last):"
_LOADER_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d{1,10})[^)]*\) "
    r"(?:is killed by signal: ([^.]{1,60})|exited unexpectedly)"
)
_SIGNAL_NAMES = {signal.strsignal(one) or one.name: one.name for one in signal.Signals}
_CAUSES = {
    Meaning.OWN: Cause.EXCEPTION,
    Meaning.MEMORY: Cause.OUT_OF_MEMORY,
    Meaning.DEVICE: Cause.DEVICE_STUCK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a rank ended, if neither another rank nor the launcher caused it to end."""

    rank: int
    cause: Cause
    moment_ns: int  # on rank 0's clock if its host's clock was compared; 0: not known
    how: str  # equal for endings of one kind
    words: str
    frame: Frame | None
    evidence: tuple[str, ...]
    certain: bool


def find_ended(picture: Picture) -> list[Finding]:
    """Report the ranks that failed, earliest first.

    Ranks that were stopped, or that failed because of another rank, are left out.
    """
    endings = [
        ending
        for facts in picture.evidence.ranks.values()
        if (ending := ending_of(picture, facts)) is not None
    ]
    if not endings:
        return []
    ordered, is_known = in_order(picture, endings)
    root = _describe(picture, ordered[0])
    if not is_known and len({(e.cause, e.frame, e.how) for e in ordered}) > 1:
        root = _not_surely_first(root, ordered)
    alike: dict[tuple[object, ...], list[Ending]] = {}
    for ending in ordered[1:]:
        alike.setdefault((ending.cause, ending.frame, ending.how), []).append(ending)
    return [root, *(_later(picture, ends) for ends in alike.values())]


def in_order(picture: Picture, endings: list[Ending]) -> tuple[list[Ending], bool]:
    """Sort the endings, with the root cause first; return them and whether the order is known.

    The order is known if the ranks' clocks are comparable or if the coordinator observed the order.
    """
    ranks = picture.evidence.ranks
    by_coordinator = {rank: place for place, rank in enumerate(picture.evidence.incident.ended)}
    hosts = {ranks[ending.rank].identity.boot_id for ending in endings}
    compared = all(ranks[ending.rank].identity.clock_error_ns >= 0 for ending in endings)
    one_clock = len(hosts) == 1 or compared
    timed = all(ending.moment_ns for ending in endings)
    if one_clock and timed:
        ordered = sorted(endings, key=lambda e: (e.moment_ns, e.rank))
    elif all(ending.rank in by_coordinator for ending in endings):
        ordered = sorted(endings, key=lambda e: by_coordinator[e.rank])
        one_clock = True
    else:
        ordered = sorted(endings, key=lambda e: (_exit_order(ranks[e.rank]), e.rank))
    memory = next((e for e in ordered if e.cause is Cause.OUT_OF_MEMORY), None)
    if memory is not None and _is_killed_for(ranks[ordered[0].rank], ordered[0], memory, one_clock):
        ordered = [memory, *(ending for ending in ordered if ending is not memory)]
    return ordered, one_clock or len(ordered) == 1


def _is_killed_for(facts: RankEvidence, first: Ending, memory: Ending, is_timed: bool) -> bool:
    """Return whether a rank might have been killed because another rank ran out of memory."""
    if first.cause is not Cause.DEAD_PROCESS or facts.host.exit_code != -signal.SIGKILL:
        return False
    apart_ns = abs(memory.moment_ns - first.moment_ns)
    return not (is_timed and first.moment_ns and memory.moment_ns) or apart_ns < _TOGETHER_NS


def _exit_order(facts: RankEvidence) -> int:
    order = facts.host.exit_order
    return order if order >= 0 else 1 << 30


def _not_surely_first(root: Finding, ordered: list[Ending]) -> Finding:
    """Lower the confidence in the root finding, because another rank might have ended first."""
    others = rank_list([ending.rank for ending in ordered[1:]])
    return root.changed(
        confidence=Confidence.POSSIBLE,
        would_settle=(
            *root.would_settle,
            f"whether {others} ended before rank {ordered[0].rank}: their hosts' clocks differ",
            "the order in which the coordinator was notified of the endings",
        ),
    )


def _later(picture: Picture, endings: list[Ending]) -> Finding:
    """Combine endings that followed the first one and share a cause into a single finding."""
    first = _describe(picture, endings[0])
    if len(endings) == 1:
        return first
    ranks = tuple(sorted(ending.rank for ending in endings))
    rest = [rank for rank in ranks if rank != endings[0].rank]
    return first.changed(
        culprit_ranks=ranks,
        summary=f"{endings[0].words}; {rank_list(rest)} ended the same way",
        fallout_ranks=picture.fallout(ranks),
    )


def ending_of(picture: Picture, facts: RankEvidence) -> Ending | None:
    """Describe how a rank ended, or return None if the rank did not end on its own."""
    host = facts.host
    raised = _raised(facts)
    if raised is not None and _was_only_printed(picture, facts, raised):
        raised = None
    if host.stopped_by_agent or (host.alive and raised is None):
        return None
    if raised is not None:
        meaning = _meaning(facts, raised)
        if meaning is Meaning.CONSEQUENCE:
            return None
        is_interrupt = raised.type.rpartition(".")[2] == "KeyboardInterrupt"
        if is_interrupt and _was_asked_to_end(picture):
            return None
        return _by_exception(facts, _CAUSES[meaning], raised)
    if host.exit_code is None:
        return None
    if host.exit_code == 0:
        return None  # the rules on waits decide whether it left too early
    if host.exit_code in _ASKED and _was_asked_to_end(picture):
        return None
    return None if is_victim(picture, facts) else _by_death(facts)


def _meaning(facts: RankEvidence, raised: Raised) -> Meaning:
    words = facts.last_words
    bases = () if words is None else words.bases
    trace = "" if words is None else words.traceback
    trace += "\n".join(frame.file for frame in raised.frames)
    message = raised.message
    if raised.type.rpartition(".")[2].startswith("Dist"):
        message += f"\n{raised.rest}"  # NCCL's own message is on the next lines
    return meaning_of(raised.type, message, bases, trace)


def is_victim(picture: Picture, facts: RankEvidence) -> bool:
    """Return whether a rank was killed by a watchdog or died after a long wait for other ranks."""
    host = facts.host
    if host.exit_code not in _ABORTS or host.oom_kill:
        return False
    if host.exit_code != -signal.SIGKILL and died_by_watchdog(host.stderr_tail):
        return True
    return long_wait_s(picture, facts) >= LONG_WAIT_S


def long_wait_s(picture: Picture, facts: RankEvidence) -> float:
    """Return how many seconds a dead rank had waited for ranks that outlived it."""
    if not facts.host.exited_mono_ns:
        return 0.0
    ranks = picture.evidence.ranks
    ended_ns = facts.host.exited_mono_ns + facts.offset_ns
    waited = [
        own_wait_s(facts, ended_ns)
        for wait in picture.graph.waits
        if facts.rank in wait.waiting
        and any(rank in ranks and _lived_on(ranks[rank]) for rank in wait.absent)
    ]
    return max(waited, default=0.0)


def _lived_on(facts: RankEvidence) -> bool:
    return bool(facts.host.alive) or facts.host.stopped_by_agent


def own_wait_s(facts: RankEvidence, until_ns: int) -> float:
    """Return the age of a rank's oldest pending operation at `until_ns`, in seconds."""
    pending = np.isin(facts.rows["state"], (State.CREATED, State.STARTED))
    if not pending.any():
        return 0.0
    return max(0, until_ns - int(facts.rows["created_ns"][pending].min())) / 1e9


def _was_asked_to_end(picture: Picture) -> bool:
    """Return whether a user stopped the job."""
    return picture.evidence.incident.kind == "signal"


def _raised(facts: RankEvidence) -> Raised | None:
    """Return the exception that ended a rank, from its own record or from stderr."""
    words = facts.last_words
    if words is not None:
        frame = site_frame(words.site)
        if frame is not None and not frame.is_users:
            told = last_traceback(f"{words.traceback}\n")
            frame = told.frame if told is not None and told.frame is not None else frame
        return _within_loader(Raised(words.type, words.message, frame))
    code = facts.host.exit_code
    if not code or (code < 0 and code != -signal.SIGABRT):
        return None
    found = [
        one
        for text in (facts.host.error_file, facts.host.stderr_tail)
        if (one := last_traceback(text)) is not None
    ]
    own = [one for one in found if one.frame is not None and one.frame.is_users]
    raised = next(iter(own + found), None)
    if raised is None or raised.type == "SystemExit":
        return None
    return _within_loader(raised)


def _was_only_printed(picture: Picture, facts: RankEvidence, raised: Raised) -> bool:
    """Return whether a traceback on stderr belongs to an error that the job survived."""
    return facts.last_words is None and any(
        one.is_named_by(raised.type, raised.message) for one in picture.survived
    )


def _within_loader(raised: Raised) -> Raised:
    """Unwrap an error that a data-loader worker passed on; return any other error unchanged."""
    text = f"{raised.message}\n{raised.rest}"
    if _ORIGINAL not in text:
        return raised
    inner = last_traceback(text.replace(_ORIGINAL, _ORIGINAL.removeprefix("Original ")) + "\n")
    if inner is None:
        return raised
    told = f"{inner.message} (in a data loader's worker)" if inner.message else inner.message
    return Raised(inner.type, told, inner.frame or raised.frame, inner.frames)


def _loader_death(raised: Raised) -> str:
    """Describe how a data-loader worker died if an error reports its death, else return ""."""
    dead = _LOADER_DEATH.search(raised.message)
    if dead is None:
        return ""
    name = _SIGNAL_NAMES.get(dead[2].strip(), f"signal {dead[2]}") if dead[2] else ""
    how = f"was killed by {name}" if name else "exited unexpectedly"
    return f"(pid {dead[1]}), which {how}"


def _by_exception(facts: RankEvidence, cause: Cause, raised: Raised) -> Ending:
    short, frame = raised.type.rpartition(".")[2], raised.frame
    first = raised.message.splitlines()[0] if raised.message else ""
    said = f"{short}: {first}" if first else short
    place = f" ({frame})" if frame else ""
    lines = [f"rank {facts.rank} raised {said}{place}"]
    words = f"rank {facts.rank} raised {said}{place}"
    death = _loader_death(raised)
    if death:
        cause = Cause.DEAD_PROCESS
        words = f"rank {facts.rank} lost its data-loader worker {death}, and raised {short}{place}"
        frame = None  # which is wherever the signal of the death happened to arrive
    if facts.host.exit_code is not None:
        lines.append(f"rank {facts.rank} ended {exit_words(facts.host.exit_code)}")
    if facts.last_words is not None and facts.last_words.traceback:
        told = facts.last_words.traceback.splitlines()
        tail = [line for line in told if line.strip(" ^~")][-3:]  # without lines that only point
        lines.append("its traceback ends: " + " | ".join(line.strip() for line in tail))
    return Ending(
        rank=facts.rank,
        cause=cause,
        moment_ns=_moment_ns(facts),
        how=short,
        words=words,
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
    elif host.oom_kill is False and code == -signal.SIGKILL:
        lines.append(f"rank {facts.rank}: its cgroup counted no out-of-memory kill")
    lines += fault_lines(facts)
    if host.rss_bytes:
        lines.append(f"rank {facts.rank} had {host.rss_bytes / 2**20:.0f} MiB resident")
    row = last_row(facts)
    where = short_site(facts_site(facts))
    tail = [line for line in host.stderr_tail.splitlines() if line.strip()][-2:]
    if tail and code != -signal.SIGKILL:  # a kill leaves no time for output
        lines.append(
            f"rank {facts.rank}'s stderr ends: " + " | ".join(line.strip() for line in tail)
        )
    if row is None and facts.has_ring:
        lines.append(f"rank {facts.rank} had not begun any operation")
    words = f"rank {facts.rank} ended {exit_words(code)}"
    if where:
        words += f" inside its span '{facts.open_spans[-1].name}' ({where})"
    elif code in _SIGABRT and (said := cpp_abort(host.stderr_tail)):
        words += f" ({said})"
    return Ending(
        rank=facts.rank,
        cause=cause,
        moment_ns=_moment_ns(facts),
        how=exit_words(code),
        words=words if cause is Cause.DEAD_PROCESS else f"{words}: out of memory",
        frame=None,
        evidence=tuple(lines),
        certain=True,
    )


def facts_site(facts: RankEvidence) -> str:
    """Return the call site of the innermost span still open when a rank ended; "" if none was."""
    return facts.open_spans[-1].site if facts.open_spans else ""


def _moment_ns(facts: RankEvidence) -> int:
    """Return the time at which a rank raised its exception or exited; 0 if unknown."""
    words = facts.last_words
    moment = words.mono_ns if words is not None and words.mono_ns else facts.host.exited_mono_ns
    return moment + facts.offset_ns if moment else 0


def exit_words(code: int) -> str:
    """Describe how a process ended, for example `by SIGKILL` or `with exit code 3`."""
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
        next_action=_next_action(_stderr_of(evidence, facts), facts, ending),
        scope=Scope.SHARED,
    )


def _reports_of(picture: Picture, rank: int) -> list[str]:
    """Quote the first line of another rank's lost-peer or timeout error, if there is one."""
    for other, facts in picture.evidence.ranks.items():
        row = last_row(facts)
        text = picture.evidence.error(row) if row is not None else ""
        if other != rank and ("PeerLost" in text or "Timeout" in text):
            return [f"rank {other} recorded: {text.splitlines()[0]}"]
    return []


def _same_elsewhere(picture: Picture, facts: RankEvidence) -> list[str]:
    """Name the other ranks that raised the same exception at the same line."""
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
    return [f"{rank_list(same)} raised the same error there later"] if same else []


def _stderr_of(evidence: Evidence, facts: RankEvidence) -> str:
    """Return the path of an ended rank's stderr within the run directory."""
    folder = f"attempt_{facts.identity.attempt}"
    number = evidence.incident.set_aside.get(facts.rank)
    if number is None:
        return f"rank_{facts.rank}/{folder}/stderr.log"
    aside = f"rank_{facts.rank}/lost_{number}_of_{folder}/stderr.log"
    return f"{aside} (in {folder} until the rank is replaced)"


def _next_action(stderr: str, facts: RankEvidence, ending: Ending) -> str:
    if ending.cause is Cause.OUT_OF_MEMORY:
        return (
            f"Lower the memory that rank {facts.rank} needs (batch, sequence, activations) "
            "or raise its limit."
        )
    if ending.cause is Cause.EXCEPTION:
        if _FULL_SHM.search(ending.words):
            return (
                "Give the container more shared memory (docker --shm-size; Kubernetes: an emptyDir "
                f"of medium Memory at /dev/shm); the full traceback is in {stderr}."
            )
        place = f" at {ending.frame}" if ending.frame else ""
        return f"Fix the exception{place}; the full traceback is in {stderr}."
    if "data-loader worker" in ending.words:
        return (
            "Look for what ended the worker: memory (dmesg names what the kernel killed for it), "
            f"a /dev/shm that is too small, a crash in its C code; see {stderr}."
        )
    if ending.cause is Cause.DEVICE_STUCK:
        return (
            f"Take rank {facts.rank}'s device out of the job; read its error counters and the "
            "machine's log (dmesg)."
        )
    if facts.host.exit_code in _SIGABRT and is_gloos_exit(facts.host.stderr_tail):
        return (
            "Call torch.distributed.destroy_process_group() before the program ends: without "
            f"it, torch's Gloo threads can abort the process at exit. Otherwise see {stderr}."
        )
    return f"See {stderr} and the machine's log (dmesg) for what killed rank {facts.rank}."
