"""Find stalled TCP connections between ranks.

A connection is a link if both ends are ranks of the job. A link is broken if bytes are waiting to
be acknowledged or read, and no bytes are moving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from echelon.analysis.evidence.model import RankEvidence
from echelon.recorder.format.schema import Socket

_ESTABLISHED = "ESTABLISHED"
_End = TypeVar("_End", int, str)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenLink:
    """A connection on which data is waiting but not moving."""

    sender: int
    receiver: int
    sender_host: str  # addresses, without ports
    receiver_host: str
    unsent_bytes: int
    unread_bytes: int
    retransmits: int  # -1: the kernel did not say

    @property
    def is_dead(self) -> bool:
        """True if packets are being lost.

        The sign of this is that bytes are unacknowledged although the receiver has no unread bytes.
        """
        return bool(self.unsent_bytes) and not self.unread_bytes

    def __str__(self) -> str:
        """Describe the link: `rank 1 (10.0.0.1) to rank 2 (10.0.0.2): 4,096 bytes ...`."""
        ends = (
            f"rank {self.sender} ({self.sender_host}) to rank {self.receiver}"
            f" ({self.receiver_host})"
        )
        if self.unread_bytes:
            return f"{ends}: {self.unread_bytes:,} bytes have arrived but were not read"
        again = f", retransmitted {self.retransmits} times" if self.retransmits > 0 else ""
        return f"{ends}: {self.unsent_bytes:,} bytes sent but not acknowledged{again}"


def broken_links(ranks: Mapping[int, RankEvidence]) -> tuple[BrokenLink, ...]:
    """Return the broken links in descending order of their unacknowledged plus unread bytes."""
    ends = {
        (one.local, one.peer): (rank, one)
        for rank, facts in ranks.items()
        for one in facts.host.sockets
        if one.state == _ESTABLISHED and not _is_loopback(one.local)
    }
    found = [
        link
        for (local, peer), (rank, socket) in ends.items()
        if (peer, local) in ends
        for link in _judge(rank, socket, *ends[peer, local])
    ]
    return tuple(sorted(found, key=lambda link: -(link.unsent_bytes + link.unread_bytes)))


def common_end(links: Iterable[BrokenLink]) -> tuple[int, ...]:
    """Find the host that has broken links to the most hosts; return its ranks with broken links.

    If several hosts tie, return the rank that has broken links to the most ranks, or () if several
    ranks tie as well.
    """
    links = tuple(links)
    host = _most_frequent({frozenset((one.sender_host, one.receiver_host)) for one in links})
    if host is not None:
        at_host = {one.sender for one in links if one.sender_host == host}
        at_host |= {one.receiver for one in links if one.receiver_host == host}
        return tuple(sorted(at_host))
    rank = _most_frequent({frozenset((one.sender, one.receiver)) for one in links})
    return () if rank is None else (rank,)


def _judge(rank: int, mine: Socket, other: int, theirs: Socket) -> Iterator[BrokenLink]:
    if mine.moved_bytes > 0 or theirs.moved_bytes > 0:
        return
    # A packet that has no route is not even counted as retransmitted.
    unacknowledged = mine.unsent_bytes > 0 and (mine.retransmits != 0 or mine.moved_bytes == 0)
    if unacknowledged or theirs.unread_bytes > 0:
        yield BrokenLink(
            sender=rank,
            receiver=other,
            sender_host=_host(mine.local),
            receiver_host=_host(mine.peer),
            unsent_bytes=mine.unsent_bytes,
            unread_bytes=theirs.unread_bytes,
            retransmits=mine.retransmits,
        )


def _most_frequent(pairs: Iterable[frozenset[_End]]) -> _End | None:
    counts = Counter(end for pair in pairs for end in pair).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return None
    return counts[0][0]


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _is_loopback(address: str) -> bool:
    host = _host(address).strip("[]").removeprefix("::ffff:")
    return host.startswith("127.") or host == "::1"
