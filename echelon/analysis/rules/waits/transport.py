"""Detect operations that every rank has entered but that do not complete.

Such an operation is held up by the transport or by a device.
"""

from __future__ import annotations

import re
from collections import Counter

from echelon.analysis.evidence.links import BrokenLink, common_end
from echelon.analysis.evidence.matching.waits import Wait
from echelon.analysis.evidence.picture import Picture, last_row
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list, seconds
from echelon.analysis.rules.endings.errors import Meaning, meaning_of

_NAMED = re.compile(r"(?:\branks?|\bmissing:?) (\d{1,7}(?:(?:, | and )\d{1,7})*)")
_SHOWN_LINKS = 4
_LOST = ("PeerLost", "StoreConnection", "ConnectionReset", "DistNetwork", "onnection closed")
_SETTLES = (
    "bytes moved per peer since the operation began, on every rank",
    "socket queues (unread and unsent bytes) and retransmits per peer",
    "device errors and an event query, if a device does the transport",
)


def find_transport(picture: Picture) -> list[Finding]:
    """Report lost connections, or an incomplete operation that all members have entered."""
    inside = [wait for wait in picture.graph.waits if _is_full(picture, wait)]
    if inside:
        return [_describe(picture, min(inside, key=lambda wait: wait.since_ns))]
    return _broken(picture)


def _is_full(picture: Picture, wait: Wait) -> bool:
    if wait.absent or wait.vague or wait.members < 2 or wait.has_mismatch:
        return False
    if wait.completed and not picture.is_cut_off(wait):
        return False
    return not (wait.is_p2p and picture.evidence.incident.kind != "stall")


def _describe(picture: Picture, wait: Wait) -> Finding:
    age_s = picture.waited_s(wait)
    since = f" up to {seconds(age_s)} ago" if age_s >= 0.001 else ""
    links = picture.links_within((*wait.waiting, *wait.completed))
    culprits = common_end(links)
    return Finding(
        cause=Cause.NETWORK,
        culprit_ranks=culprits,
        confidence=Confidence.LIKELY if links else Confidence.POSSIBLE,
        group=wait.group,
        operation=wait.operation,
        sequence=wait.number,
        summary=f"all {wait.members} ranks have entered {wait} of group '{wait.group}'{since}, and "
        f"{_progress(wait)}: {_whose(links, culprits)}",
        evidence=(
            f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}', {_progress(wait)}",
            *(str(link) for link in links[:_SHOWN_LINKS]),
        ),
        fallout_ranks=tuple(rank for rank in wait.waiting if rank not in culprits),
        would_settle=() if links else (*_world(picture), *_SETTLES),
        scope=Scope.FALLOUT,
        next_action=f"Check the network of {rank_list(culprits)}'s host."
        if culprits
        else "Check the links between this group's hosts and their socket queues.",
    )


def _world(picture: Picture) -> tuple[str, ...]:
    """If no record states the number of ranks, warn that a rank might be missing."""
    if not picture.evidence.is_world_inferred:
        return ()
    size = picture.evidence.world_size
    return (f"how many ranks the job had: the dumps list no members; rank {size} may be missing",)


def _progress(wait: Wait) -> str:
    if wait.completed:
        return f"only {rank_list(wait.completed)} completed it"
    return "none has completed it"


def _whose(links: tuple[BrokenLink, ...], culprits: tuple[int, ...]) -> str:
    if not links:
        return "the transport or a device, and nothing recorded singles out a rank"
    hosts = sorted({host for link in links for host in (link.sender_host, link.receiver_host)})
    if culprits:
        return f"nothing moves on the connections of {rank_list(culprits)}"
    return f"nothing moves on the connections between {' and '.join(hosts)}"


def _broken(picture: Picture) -> list[Finding]:
    """Report the lost connections that ranks recorded.

    The culprit is the rank at the far end of most lost connections, if one rank stands out.
    """
    texts = {rank: text for rank, text in _errors(picture).items() if text}
    if not texts:
        return []
    named = Counter(
        other for rank, text in texts.items() for other in _named(text) if other != rank
    ).most_common(2)
    single = bool(named) and (len(named) == 1 or named[0][1] > named[1][1])
    culprits = (named[0][0],) if single else ()
    quoted = [f"rank {rank}: {text.splitlines()[0]}" for rank, text in list(texts.items())[:4]]
    whom = f"most of them to {rank_list(culprits)}" if culprits else "no rank stands out"
    return [
        Finding(
            cause=Cause.NETWORK,
            culprit_ranks=culprits,
            confidence=Confidence.LIKELY if culprits else Confidence.POSSIBLE,
            summary=f"{rank_list(list(texts))} lost connections{_lives(picture)}; {whom}",
            evidence=tuple(quoted),
            fallout_ranks=tuple(sorted(set(texts) - set(culprits))),
            would_settle=_SETTLES[:2],
            scope=Scope.FALLOUT,
            next_action=f"Check the link of {rank_list(culprits)}'s host."
            if culprits
            else "Check the links between the hosts of this job.",
        )
    ]


def _lives(picture: Picture) -> str:
    alive = all(facts.host.alive for facts in picture.evidence.ranks.values())
    return " although every process is alive" if alive else ""


def _errors(picture: Picture) -> dict[int, str]:
    found: dict[int, str] = {}
    for rank, facts in picture.evidence.ranks.items():
        row = last_row(facts)
        text = picture.evidence.error(row) if row is not None else ""
        words = facts.last_words
        if not any(sign in text for sign in _LOST) and words is not None:
            meaning = meaning_of(words.type, words.message, words.bases, words.traceback)
            text = words.message if meaning is Meaning.CONSEQUENCE else ""
        found[rank] = text if text and "Mismatch" not in text else ""
    return found


def _named(text: str) -> set[int]:
    return {int(n) for match in _NAMED.findall(text) for n in re.findall(r"\d+", match)}
