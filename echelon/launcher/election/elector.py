"""An elector: one vote per term, granted to no node while the host may hold its lease. Pure.

A vote is refused as long as the promise of the last beat holds, to a candidate that lacks a change
this elector has (a majority holds every change that took effect, so no winner lacks one), and to a
second candidate of a term. The promise is released early where the host's machine itself has said
that its launcher is gone: its connection was closed, and a new one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.launcher.election.mandate import Mandate

VOTE_S = 1.5  # a granted vote binds so long: for the winner to be heard of


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvass:
    """A node asks electors for a vote, and who hosts the job.

    Attributes:
        term: in which it would host.
        version: of the mandate that it holds.
        is_binding: false for a question that commits no elector: a candidate stands only once a
            majority would vote for it, and so never disturbs a host that the others still hear.
    """

    node: str
    term: int
    version: tuple[int, int]
    is_binding: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An elector's answer.

    Attributes:
        term: the latest that it knows.
        granted: it votes for the candidate in the term that was asked for.
        early: it does so before its promise to the former host has expired.
        host: the node that it takes for the host, "" if it knows none.
        endpoint: that host's.
    """

    term: int
    granted: bool = False
    early: bool = False
    host: str = ""
    endpoint: str = ""


class Elector:
    """One node's vote.

    Args:
        name: the node's own.
        promise_s: how long a beat of the host binds it.
    """

    def __init__(self, name: str, promise_s: float) -> None:
        self.name = name
        self.promise_s = promise_s
        self.term = 0
        self.host = ""
        self.mandate: Mandate | None = None
        self._named_version = (-1, -1)  # of the latest mandate that makes this node an elector
        self._voted_for = ""
        self._promised_until_s = float("-inf")  # to the host
        self._bound_until_s = float("-inf")  # by the last vote
        self._released = False

    @property
    def version(self) -> tuple[int, int]:
        """That of the mandate it holds."""
        return (-1, -1) if self.mandate is None else self.mandate.version

    def free_s(self, now_s: float) -> float:
        """Return how long this elector may not vote yet."""
        promised_s = float("-inf") if self._released else self._promised_until_s
        return max(0.0, promised_s - now_s, self._bound_until_s - now_s)

    def on_beat(self, term: int, host: str, now_s: float) -> bool:
        """Take in a host's beat; return False if a later host is known."""
        if term < self.term or (self.host and term == self.term and host != self.host):
            return False
        self.term, self.host = term, host
        self._voted_for = host
        self._promised_until_s = now_s + self.promise_s
        self._bound_until_s = float("-inf")
        self._released = False
        return True

    def on_mandate(self, mandate: Mandate) -> None:
        """Keep a mandate, unless a later one, or a later host, is known."""
        if mandate.term >= self.term and mandate.version > self.version:
            self.mandate = mandate
            if self.name in mandate.electors:
                self._named_version = mandate.version

    def lose_host(self, *, is_dead: bool) -> None:
        """Note that the host is lost.

        Args:
            is_dead: its machine refuses connections, so its launcher is gone.
        """
        self.host = ""
        self._released = self._released or is_dead

    def on_canvass(self, asked: Canvass, now_s: float) -> Answer:
        """Answer a node that asks for a vote or for the host."""
        if not self._may_vote(asked, now_s):
            return self._answer()
        if not asked.is_binding:
            return Answer(term=self.term, granted=True)
        self.term, self._voted_for, self.host = asked.term, asked.node, ""
        self._bound_until_s = now_s + VOTE_S
        return Answer(term=self.term, granted=True, early=now_s < self._promised_until_s)

    def _may_vote(self, asked: Canvass, now_s: float) -> bool:
        if self.mandate is None:
            return False
        # A later mandate may name other electors, and the candidate holds it.
        if asked.version <= self.version and asked.node not in self.mandate.electors:
            return False
        # A mandate that only removes this elector may be held by no other: a candidate that lacks
        # it needs a majority of the remaining electors as well, and that decides.
        if asked.version < self._named_version:
            return False
        if asked.term == self.term and asked.node == self._voted_for and not self.host:
            return True  # asked again: the answer was lost
        return asked.term > self.term and self.free_s(now_s) == 0.0

    def _answer(self) -> Answer:
        member = None if self.mandate is None else self.mandate.member(self.host)
        endpoint = "" if member is None else member.endpoint
        return Answer(term=self.term, host=self.host, endpoint=endpoint)

    def win(self, term: int) -> None:
        """Note that this node was elected."""
        self.term, self.host = term, self.name
