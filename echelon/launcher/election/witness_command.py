"""Implement `echelon witness`, a program on a separate machine that helps elect a hosting node."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon import __version__
from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.control.endpoint import WITNESS_PORT, join, read_secret
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.server import ControlServer
from echelon.launcher.control.tls import TlsFiles, tls_files
from echelon.launcher.election.lease import now_s
from echelon.launcher.election.mandate import unpack_mandate
from echelon.launcher.election.polls import asked_of, vote_of
from echelon.launcher.election.witness import Renewal, Witness
from echelon.launcher.options.arguments import Parser
from echelon.launcher.options.options import dashes
from echelon.launcher.options.texts import not_negative


class WitnessServer:
    """A witness that listens on `address` (host:port) and answers on its server's thread.

    Raises:
        LaunchError: the address cannot be bound.
    """

    def __init__(self, address: str, secret: bytes, tls: TlsFiles | None = None) -> None:
        self._witness = Witness()
        self._events: Mailbox[tuple[str, m.Event]] = Mailbox()
        self._server = ControlServer(
            address, secret, self._events, tls=tls, answer=self._answer, is_open=False
        )
        self.port = self._server.port

    def close(self) -> None:
        """Stop answering requests, and close the port."""
        self._server.close()
        self._events.close()

    def _answer(self, question: m.Event | m.Command) -> m.Event | m.Command | None:
        if isinstance(question, m.Poll):
            asked = asked_of(question)
            return vote_of(self._witness.on_canvass(question.founder, asked, now_s()))
        if not isinstance(question, m.Renew):
            raise LaunchError("this endpoint belongs to a witness, which does not host jobs")
        renewed = self._witness.on_renewal(question.founder, _renewal(question), now_s())
        return m.LeaseReply(
            term=renewed.term, number=renewed.number, stamp=renewed.number,
            version=list(renewed.version),
        )  # fmt: skip


def _renewal(renew: m.Renew) -> Renewal:
    return Renewal(
        term=renew.term, host=renew.host, number=renew.number, holds=renew.holds,
        promise_s=renew.promise_ms / 1e3, mandate=unpack_mandate(renew.mandate),
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run `echelon witness` until SIGTERM or SIGINT; return the exit code.

    The exit code is 1 if the address cannot be bound, and 2 for a usage error.
    """
    parser = Parser(
        prog="echelon witness",
        description="Vote in jobs of two nodes, so that one can continue if the other is lost. "
        "Run it on a third machine, for `echelon run --rdzv-witness`.",
    )
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    parser.add_argument(
        "--port", type=not_negative, default=WITNESS_PORT, metavar="PORT",
        help=f"port to listen on (default {WITNESS_PORT}; 0: any free port, which is printed)",
    )  # fmt: skip
    parser.add_argument(
        "--bind", default="0.0.0.0", metavar="ADDRESS",  # noqa: S104 -- peers prove the secret
        help="address to bind (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--rdzv-secret-file", type=Path, metavar="FILE",
        help="file with the secret of the jobs; or set ECHELON_SECRET",
    )  # fmt: skip
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--rdzv-{name}", type=Path, metavar="FILE", help="TLS, as for run")
    args = parser.parse_args([dashes(text) for text in argv])
    try:
        secret = read_secret(args.rdzv_secret_file, os.environ)
        tls = tls_files(args, None)
    except ValueError as err:
        parser.error(str(err))
    if tls is not None and tls.cert is None:
        parser.error("a witness needs --rdzv-cert and --rdzv-key for TLS")
    stopping = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)  # before any thread begins
    try:
        server = WitnessServer(join(args.bind, args.port), secret, tls)
    except LaunchError as err:
        print(f"echelon witness: {err}", file=sys.stderr)
        return 1
    print(f"witness at {join(args.bind, server.port)}", flush=True)
    signal.sigwait(stopping)
    server.close()
    return 0
