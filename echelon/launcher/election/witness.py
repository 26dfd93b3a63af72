"""Vote without running any ranks, so that either of two nodes can continue alone.

The witness stores one `Elector` per job, in memory only. A witness that has been restarted has lost
its promises, so it does not vote in a job until the job's host has registered again. A host can
register only if its lease is valid without the witness's vote, which rules out a host that has been
replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.launcher.election.elector import Answer, Canvass, Elector
from echelon.launcher.election.mandate import WITNESS, Mandate

_KEEP_S = 86_400.0
UNKNOWN_TERM = -1  # for a job that the witness does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """A host's message to the witness: a heartbeat, or only a mandate.

    Attributes:
        number: the number of the heartbeat; 0 if only a mandate is sent.
        holds: whether the host's lease is valid even without the witness's replies.
    """

    term: int
    host: str
    number: int
    holds: bool
    promise_s: float
    mandate: Mandate


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The witness's reply to a host.

    Attributes:
        term: the latest term that the witness has seen; UNKNOWN_TERM if it has no record of the
            job.
        number: the number of the acknowledged heartbeat; 0 if none is acknowledged.
        version: the version of the mandate that the witness holds.
    """

    term: int
    number: int = 0
    version: tuple[int, int] = (-1, -1)


class Witness:
    """A witness for any number of jobs, each identified by the name of its founder.

    The founder is the job's first host, whose name is unique.
    """

    def __init__(self) -> None:
        self._electors: dict[str, Elector] = {}
        self._renewed_s: dict[str, float] = {}

    def on_renewal(self, founder: str, renewal: Renewal, now_s: float) -> Renewed:
        """Handle a host's heartbeat or a new mandate; return the reply."""
        elector = self._electors.get(founder)
        if elector is None:
            if not renewal.holds:
                return Renewed(term=UNKNOWN_TERM)
            self._forget(now_s)
            elector = self._electors[founder] = Elector(WITNESS, renewal.promise_s)
        self._renewed_s[founder] = now_s
        number = 0
        if renewal.number:
            elector.promise_s = renewal.promise_s
            number = renewal.number if elector.on_beat(renewal.term, renewal.host, now_s) else 0
        elector.on_mandate(renewal.mandate)
        return Renewed(term=elector.term, number=number, version=elector.version)

    def on_canvass(self, founder: str, asked: Canvass, now_s: float) -> Answer:
        """Answer a node that asks for a vote and for the name of the current host."""
        elector = self._electors.get(founder)
        if elector is None:
            return Answer(term=UNKNOWN_TERM)
        return elector.on_canvass(asked, now_s)

    def _forget(self, now_s: float) -> None:
        """Forget jobs whose hosts have sent no heartbeat for a day."""
        for founder, renewed_s in list(self._renewed_s.items()):
            if renewed_s < now_s - _KEEP_S:
                del self._electors[founder], self._renewed_s[founder]
