"""Send the host's heartbeats and mandates to the job's witness."""

from __future__ import annotations

from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.messages import (
    Command,
    Entrust,
    Event,
    LeaseBeat,
    LeaseReply,
    Renew,
)
from echelon.launcher.control.tls import TlsFiles
from echelon.launcher.election.mandate import (
    WITNESS,
    Mandate,
    ballot_of,
    pack_mandate,
    unpack_mandate,
)
from echelon.launcher.election.questions import Questions


class Testimony:
    """A client that sends messages to the witness, and puts the replies into `events`."""

    def __init__(
        self,
        mandate: Mandate,
        secret: bytes,
        tls: TlsFiles | None,
        events: Mailbox[tuple[str, Event]],
    ) -> None:
        self._endpoint = mandate.witness
        self._founder = mandate.founder
        self._mandate = pack_mandate(ballot_of(mandate))
        self._term = mandate.term
        self._questions = Questions(secret, tls)
        self._events = events

    def send(self, command: Command) -> None:
        """Send the witness a heartbeat or a new mandate; ignore other commands. Does not block."""
        if isinstance(command, Entrust):
            mandate = unpack_mandate(command.mandate)
            self._mandate, self._term = pack_mandate(ballot_of(mandate)), mandate.term
            # Sent at once as well, because a world may wait for it.
            self._ask(Renew(
                founder=self._founder, term=mandate.term, host="", number=0, holds=False,
                promise_ms=0, mandate=self._mandate,
            ))  # fmt: skip
        elif isinstance(command, LeaseBeat):
            self._ask(Renew(
                founder=self._founder, term=command.term, host=command.host,
                number=command.number, holds=command.holds, promise_ms=command.promise_ms,
                mandate=self._mandate,
            ))  # fmt: skip

    def _ask(self, renew: Renew) -> None:
        def take(answer: Event | Command) -> None:
            if isinstance(answer, LeaseReply):
                self._events.put((WITNESS, answer))

        self._questions.ask(self._endpoint, renew, take)

    def close(self) -> None:
        """Stop the client's thread, waiting up to 3 s for it to end."""
        self._questions.close()
