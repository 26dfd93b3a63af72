"""Convert vote requests and answers to and from messages (`Poll` and `Vote`)."""

from __future__ import annotations

from echelon.launcher.control import messages as m
from echelon.launcher.election.elector import Answer, Canvass


def asked_of(poll: m.Poll) -> Canvass:
    """Return the request that a `Poll` message contains."""
    first, second = (*poll.version, -1, -1)[:2]
    return Canvass(
        node=poll.node, term=poll.term, version=(first, second), is_binding=poll.is_binding
    )


def poll_of(asked: Canvass, founder: str) -> m.Poll:
    """Return the `Poll` message for a request; `founder` identifies the job."""
    return m.Poll(
        node=asked.node, term=asked.term, version=list(asked.version),
        is_binding=asked.is_binding, founder=founder,
    )  # fmt: skip


def answer_of(vote: m.Vote) -> Answer:
    """Return the answer that a `Vote` message contains."""
    return Answer(
        term=vote.term, granted=vote.granted, early=vote.early, host=vote.host,
        endpoint=vote.endpoint,
    )  # fmt: skip


def vote_of(answer: Answer) -> m.Vote:
    """Return the `Vote` message that conveys an elector's answer."""
    return m.Vote(
        term=answer.term, granted=answer.granted, early=answer.early, host=answer.host,
        endpoint=answer.endpoint,
    )  # fmt: skip
