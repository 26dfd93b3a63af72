"""Find the new host after the loss of the former one, or stand for election.

An elector first asks the other electors whether they would vote for it (a pre-vote). It asks for
binding votes only after a majority has agreed. The electors start at staggered times, in rank
order, so the first remaining elector usually wins at once. If the votes are split, the candidates
try again after delays of different lengths. A node that is not an elector only asks which node is
the host.
"""

from __future__ import annotations

from echelon.launcher.election.elector import VOTE_S, Answer, Canvass, Elector

_ROUND_S = 1.0  # to wait for the votes
_STAGGER_S = 0.2  # per place in the order of electors
_RETRY_STAGGER_S = 0.4  # the same after a split vote, which suggests slow machines
_ASK_S = 0.3


class Candidacy:
    """A node's search for a host after its former host is lost.

    Args:
        elector: decides how this node votes.
        lost_term: the term of the lost host. A host of an earlier term is not accepted, and a host
            of the same term only after a delay.

    Attributes:
        found: the endpoint and name of the new host; None until one is found.
        is_elected: whether a majority of the electors have voted for this node.
        was_early: whether any elector voted for this node before the elector's promise to the
            former host had expired.
    """

    def __init__(self, elector: Elector, lost_term: int, now_s: float) -> None:
        self._elector = elector
        self._lost_term = lost_term
        self._same_term_s = now_s + elector.promise_s
        mandate = elector.mandate
        electors = () if mandate is None else mandate.electors
        self._place = electors.index(elector.name) if elector.name in electors else -1
        self._next_ask_s = now_s
        self._stand_s = now_s + max(0, self._place - 1) * _STAGGER_S
        self._asked: Canvass | None = None  # the question whose grants are counted
        self._round_ends_s = float("-inf")  # the end of a binding round
        self._grants: set[str] = set()
        self._latest_term = max(elector.term, lost_term)
        self.found: tuple[str, str] | None = None
        self.is_elected = self.was_early = False

    @property
    def voters(self) -> frozenset[str]:
        """The electors that voted for this node, including itself."""
        return frozenset(self._grants)

    @property
    def term(self) -> int:
        """The term for which this node asks for votes."""
        assert self._asked is not None
        return self._asked.term

    def deadline_s(self) -> float:
        """Return the time at which to call `due` again."""
        return self._next_ask_s

    def due(self, now_s: float) -> Canvass | None:
        """Return the request to send to all other electors now, or None if none is due."""
        if self.is_elected or self.found is not None or now_s < self._next_ask_s:
            return None
        self._next_ask_s = now_s + _ASK_S
        if now_s < self._stand_s < self._next_ask_s:
            self._next_ask_s = self._stand_s  # no later, because another elector's turn comes soon
        asked = self._asked
        if asked is None or not asked.is_binding:
            asked = self._sound_out(now_s)
        elif now_s >= self._round_ends_s:  # the votes are split
            self._stand_s = now_s + VOTE_S / 2 + _RETRY_STAGGER_S * self._place
            self._next_ask_s = min(self._next_ask_s, self._stand_s)
            asked = self._sound_out(now_s)
        return asked

    def _sound_out(self, now_s: float) -> Canvass:
        """Begin a round of non-binding requests for votes, and return the request to send."""
        elector = self._elector
        self._latest_term = max(self._latest_term, elector.term)
        asked = Canvass(
            node=elector.name, term=self._latest_term + 1, version=elector.version,
            is_binding=False,
        )  # fmt: skip
        self._asked, self._grants = asked, set()
        if now_s >= self._stand_s and elector.on_canvass(asked, now_s).granted:
            self._grants.add(elector.name)
        return asked

    def _stand(self, now_s: float) -> None:
        """Begin a round of requests for binding votes; this node votes for itself."""
        elector, sounded = self._elector, self._asked
        assert sounded is not None
        asked = Canvass(
            node=elector.name, term=sounded.term, version=elector.version, is_binding=True
        )
        answer = elector.on_canvass(asked, now_s)
        if answer.granted:
            self._asked, self._grants = asked, {elector.name}
            self.was_early = answer.early
            self._round_ends_s = now_s + _ROUND_S
            self._next_ask_s = now_s

    def on_answer(self, name: str, asked: Canvass, answer: Answer, now_s: float) -> None:
        """Handle an elector's answer to a request."""
        self._latest_term = max(self._latest_term, answer.term)
        if answer.host and answer.endpoint and answer.host != self._elector.name:
            is_later = answer.term > self._lost_term
            if is_later or (answer.term == self._lost_term and now_s >= self._same_term_s):
                self.found = (answer.endpoint, answer.host)
            return
        if not answer.granted or asked != self._asked or self.is_elected:
            return
        self._grants.add(name)
        mandate = self._elector.mandate
        if mandate is None or not mandate.is_majority(self._grants):
            self.was_early = self.was_early or answer.early
            return
        if not asked.is_binding:
            self._stand(now_s)
        elif self._elector.term == asked.term:  # otherwise it has since voted for another node
            self.was_early = self.was_early or answer.early
            self.is_elected = True
            self._elector.win(asked.term)
