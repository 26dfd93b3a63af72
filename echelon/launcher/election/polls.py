"""Convert polls and votes between the form that is sent and the form that electors use."""

from __future__ import annotations

from echelon.launcher.control import messages as m
from echelon.launcher.election.elector import Answer, Canvass


def asked_of(poll: m.Poll) -> Canvass:
    """Return the request in a poll."""
    first, second = (*poll.version, -1, -1)[:2]
    return Canvass(
        node=poll.node, term=poll.term, version=(first, second), is_binding=poll.is_binding
    )


def poll_of(asked: Canvass, founder: str) -> m.Poll:
    """Return a request as a poll to send, for the job with this founder."""
    return m.Poll(
        node=asked.node, term=asked.term, version=list(asked.version),
        is_binding=asked.is_binding, founder=founder,
    )  # fmt: skip


def answer_of(vote: m.Vote) -> Answer:
    """Return the answer in a vote."""
    return Answer(
        term=vote.term, granted=vote.granted, early=vote.early, host=vote.host,
        endpoint=vote.endpoint,
    )  # fmt: skip


def vote_of(answer: Answer) -> m.Vote:
    """Return an answer as a vote to send."""
    return m.Vote(
        term=answer.term, granted=answer.granted, early=answer.early, host=answer.host,
        endpoint=answer.endpoint,
    )  # fmt: skip
