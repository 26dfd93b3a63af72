"""Send a node's polls to the electors and receive their votes."""

from __future__ import annotations

from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.messages import Command, Event, Poll, Vote
from echelon.launcher.control.tls import TlsFiles
from echelon.launcher.election.questions import Questions


class Canvasser:
    """A client that polls electors, and puts each vote into `votes` as (elector, poll, vote)."""

    def __init__(self, secret: bytes, tls: TlsFiles | None) -> None:
        self._questions = Questions(secret, tls)
        self.votes: Mailbox[tuple[str, Poll, Vote]] = Mailbox()

    def ask(self, name: str, endpoint: str, poll: Poll) -> None:
        """Send a poll to the elector `name` at `endpoint` (host:port). Does not block."""

        def take(answer: Event | Command) -> None:
            if isinstance(answer, Vote):
                self.votes.put((name, poll, answer))

        self._questions.ask(endpoint, poll, take)

    def close(self) -> None:
        """Stop the client's thread, waiting up to 3 s for it to end."""
        self._questions.close()
        self.votes.close()
