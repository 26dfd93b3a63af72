"""Decide how an elector votes.

With each heartbeat that it receives, an elector makes a promise to the host: for a certain time,
the elector will not vote for another node. The promise ends early only if the host's machine
refuses connections, which proves that the launcher has exited.

An elector votes for only one candidate per term, and rejects a candidate whose mandate (the job's
replicated state) is older than the elector's. The mandate of an elected host is therefore at least
as recent as the last version that took effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.launcher.election.mandate import Mandate

VOTE_S = 1.5  # how long a granted vote binds, so that the winner can announce itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvass:
    """A node's request to an elector for its vote and for the name of the current host.

    Attributes:
        node: the name of the node that asks.
        term: the term in which the node would be the host.
        version: the version of the mandate that the node holds.
        is_binding: whether a granted vote binds the elector. A node first sends requests that are
            not binding.
    """

    node: str
    term: int
    version: tuple[int, int]
    is_binding: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An elector's answer to a node's request.

    Attributes:
        term: the latest term that the elector has seen.
        granted: whether the elector votes for the node in the requested term.
        early: whether the elector votes before its promise to the former host has expired.
        host: the node that the elector considers to be the host; "" for none.
        endpoint: the endpoint of that host.
    """

    term: int
    granted: bool = False
    early: bool = False
    host: str = ""
    endpoint: str = ""


class Elector:
    """One node's voting state: its term, host, mandate and promises.

    Args:
        name: the node's own name.
        promise_s: how long the elector's promise lasts after each heartbeat, in seconds.
    """

    def __init__(self, name: str, promise_s: float) -> None:
        self.name = name
        self.promise_s = promise_s
        self.term = 0
        self.host = ""
        self.mandate: Mandate | None = None
        self._named_version = (-1, -1)  # version of the latest mandate with this node as an elector
        self._voted_for = ""
        self._promised_until_s = float("-inf")  # to the host
        self._bound_until_s = float("-inf")  # by the last vote
        self._released = False

    @property
    def version(self) -> tuple[int, int]:
        """The version of this elector's mandate."""
        return (-1, -1) if self.mandate is None else self.mandate.version

    def free_s(self, now_s: float) -> float:
        """Return the number of seconds until this elector is free to vote; 0 if it is free now."""
        promised_s = float("-inf") if self._released else self._promised_until_s
        return max(0.0, promised_s - now_s, self._bound_until_s - now_s)

    def on_beat(self, term: int, host: str, now_s: float) -> bool:
        """Handle a heartbeat; return False if its sender is no longer the host."""
        if term < self.term or (self.host and term == self.term and host != self.host):
            return False
        self.term, self.host = term, host
        self._voted_for = host
        self._promised_until_s = now_s + self.promise_s
        self._bound_until_s = float("-inf")
        self._released = False
        return True

    def on_mandate(self, mandate: Mandate) -> None:
        """Store a mandate if it is newer than the stored one and its term is not outdated."""
        if mandate.term >= self.term and mandate.version > self.version:
            self.mandate = mandate
            if self.name in mandate.electors:
                self._named_version = mandate.version

    def lose_host(self, *, is_dead: bool) -> None:
        """Record that the host is lost.

        Args:
            is_dead: whether the host's machine refuses connections, which proves that the launcher
                has exited.
        """
        self.host = ""
        self._released = self._released or is_dead

    def on_canvass(self, asked: Canvass, now_s: float) -> Answer:
        """Answer a node that asks for a vote and for the name of the current host."""
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
        # If the candidate holds a later mandate, that one may name other electors.
        if asked.version <= self.version and asked.node not in self.mandate.electors:
            return False
        # If the later mandates only remove this elector, perhaps no other node holds them: a
        # candidate without them also needs a majority of the remaining electors, which decides.
        if asked.version < self._named_version:
            return False
        if asked.term == self.term and asked.node == self._voted_for and not self.host:
            return True  # a repeated question: the answer was lost
        return asked.term > self.term and self.free_s(now_s) == 0.0

    def _answer(self) -> Answer:
        member = None if self.mandate is None else self.mandate.member(self.host)
        endpoint = "" if member is None else member.endpoint
        return Answer(term=self.term, host=self.host, endpoint=endpoint)

    def win(self, term: int) -> None:
        """Record that this node was elected."""
        self.term, self.host = term, self.name
