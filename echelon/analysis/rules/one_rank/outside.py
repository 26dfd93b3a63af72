"""Determine which of the ranks that did not record their operations are waiting for their peers.

torch's Gloo backend runs each collective on a thread that waits with a timeout. The threads of an
idle backend wait without a timeout. The threads' system calls therefore show which ranks are inside
a collective. Before a group exists, ranks wait for the store in a socket call.

Only stacks can show which collective a rank is in, and which line of its program made the call.
"""

from __future__ import annotations

from echelon.analysis.activity import Doing, num_inside
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.rules.one_rank.doing import activity_of

_NETWORK_CALLS = frozenset(
    {
        "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2",
        "recvfrom", "recvmsg", "read", "connect",
    }
)  # fmt: skip
_SLEEPS = frozenset({"nanosleep", "clock_nanosleep", "pause", "rt_sigsuspend", "rt_sigtimedwait"})
_WORDS = {
    "futex": "waits for another thread",
    "wait4": "waits for a child process",
    "waitid": "waits for a child process",
    "flock": "waits for a file's lock",
    "fcntl": "waits for a file's lock",
    "fsync": "waits for a disk",
    "fdatasync": "waits for a disk",
}


def waits_for_peers(facts: RankEvidence) -> bool:
    """Return whether a rank appears to be in a collective or at the rendezvous."""
    if is_in_collective(facts) or activity_of(facts).doing is Doing.MEETING:
        return True
    return _is_at_rendezvous(facts)


def is_in_collective(facts: RankEvidence) -> bool:
    """Return whether a rank's main thread, or any of its Gloo threads, is inside a collective."""
    if facts.host.process_state in ("T", "t"):
        return False
    if num_inside(facts.host.threads, facts.host.native_stacks):
        return True
    return activity_of(facts).doing is Doing.COLLECTIVE


def is_seen_outside(facts: RankEvidence) -> bool:
    """Return whether a rank's Gloo threads were found and the rank is outside any collective."""
    return any(thread.is_gloos for thread in facts.host.threads) and not is_in_collective(facts)


def outside_words(facts: RankEvidence) -> str:
    """Describe the main thread in a phrase that completes "rank R ..."; return "" if unknown."""
    if not facts.host.threads:
        return ""
    call = facts.host.threads[0].call
    if not call:
        return "runs" if facts.host.process_state == "R" else ""
    if call in _SLEEPS:
        return f"sleeps ({call})"
    if call in _NETWORK_CALLS:
        return f"waits for data ({call})"
    return f"{_WORDS.get(call, 'is in the kernel')} ({call})"


def outside_lines(facts: RankEvidence) -> list[str]:
    """Describe what the kernel reports about a rank's threads."""
    words = outside_words(facts)
    lines = [f"rank {facts.rank}: its main thread {words}"] if words else []
    gloo = [thread for thread in facts.host.threads if thread.is_gloos]
    if gloo:
        inside = is_in_collective(facts)
        what = "one waits for a peer" if inside else "none is in a collective"
        lines.append(f"rank {facts.rank}: of its {len(gloo)} Gloo threads, {what}")
    return lines


def keeps_waiting(picture: Picture) -> tuple[int, ...]:
    """Return the live ranks for which other ranks appear to be waiting.

    The result is () if any rank has a record, if no rank is waiting, or if all ranks are waiting.
    """
    return picture.remembered("keeps_waiting", _keeps_waiting)


def _keeps_waiting(picture: Picture) -> tuple[int, ...]:
    ranks = [facts for facts in picture.evidence.ranks.values() if facts.host.alive]
    if any(facts.has_ring or len(facts.rows) for facts in ranks):
        return ()
    for waits in (is_in_collective, waits_for_peers):
        if any(waits(facts) for facts in ranks):
            return tuple(facts.rank for facts in ranks if not waits(facts))
    return ()


def sleepers(picture: Picture) -> tuple[int, ...]:
    """Return the minority of ranks that sleep while the main threads of all other ranks wait.

    The result is () if any live rank has a ring or recorded operations, or if a rank's threads are
    unknown. Only waits in sends and receives are detected, because other operations do not make
    the main thread itself wait.
    """
    return picture.remembered("sleepers", _sleepers)


def _sleepers(picture: Picture) -> tuple[int, ...]:
    ranks = [facts for facts in picture.evidence.ranks.values() if facts.host.alive]
    if any(facts.has_ring or len(facts.rows) or not facts.host.threads for facts in ranks):
        return ()
    asleep = [facts.rank for facts in ranks if facts.host.threads[0].call in _SLEEPS]
    waits = _NETWORK_CALLS | {"futex"}
    rest = [facts for facts in ranks if facts.rank not in asleep]
    if not all(facts.host.threads[0].call in waits for facts in rest):
        return ()
    return tuple(asleep) if 0 < 2 * len(asleep) < len(ranks) else ()


def waits_unrecorded(picture: Picture, rank: int) -> bool:
    """Return whether a rank with no ring and no operations appears to be in a collective."""
    facts = picture.evidence.ranks.get(rank)
    if facts is None or facts.has_ring or len(facts.rows):
        return False
    return is_in_collective(facts)


def waiting_ranks(picture: Picture) -> tuple[int, ...]:
    """Return the live ranks that appear to be waiting for their peers."""
    return picture.remembered("waiting_ranks", _waiting_ranks)


def _waiting_ranks(picture: Picture) -> tuple[int, ...]:
    ranks = picture.evidence.ranks.values()
    return tuple(facts.rank for facts in ranks if facts.host.alive and waits_for_peers(facts))


def _is_at_rendezvous(facts: RankEvidence) -> bool:
    """Return whether a rank appears to be waiting at the rendezvous."""
    host = facts.host
    connected = any(one.state == "ESTABLISHED" for one in host.sockets)
    return bool(
        connected
        and host.threads
        and host.threads[0].call in _NETWORK_CALLS
        and not any(thread.is_gloos for thread in host.threads)
    )
