"""Run the services of the hosting node: the store and the coordinator.

The node that owns the endpoint starts these services at the beginning of the job. A node that is
elected as the new hosting node starts the services after the election.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from echelon.launcher.control import messages as m
from echelon.launcher.control.link import LocalLink, Mailbox
from echelon.launcher.coordinator.coordinator import Coordinator
from echelon.launcher.coordinator.gathering.meeting import StoreProcess
from echelon.launcher.coordinator.observers import JobEnded, Observers
from echelon.launcher.election.mandate import WITNESS
from echelon.launcher.goodput.book import Book
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.notices.outside import Outside
from echelon.launcher.options.options import Options
from echelon.launcher.output.output import Terminal

if TYPE_CHECKING:  # gRPC only where several nodes need it
    from echelon.launcher.control.server import ControlServer
    from echelon.launcher.election.mandate import Mandate
    from echelon.launcher.election.succession import Succession
    from echelon.launcher.election.testimony import Testimony

_LOOPBACK = "127.0.0.1"


class Hosting:
    """The services that the launcher of the hosting node runs.

    Args:
        options: the launcher's options, with this node's address as the rendezvous.
        events: the mailbox in which network messages from nodes arrive.

    Attributes:
        link: the link between this node's own agent and the coordinator.
        server: the server that other nodes connect to; None for a single-node job. The creator of
            this object sets and closes the server.
        coordinator: the coordinator; None until `begin` is called.
    """

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        report: Report,
        terminal: Terminal,
        events: Mailbox[tuple[str, m.Event]],
    ) -> None:
        self._options = options
        self._directory = directory
        self._terminal = terminal
        self.say = terminal.say
        self.report = report
        self.events = events
        self.link = LocalLink(lambda event: events.put((options.node_name, event)))
        self.server: ControlServer | None = None
        self.coordinator: Coordinator | None = None
        self.succession: Succession | None = None
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.link.close)
        self._book = Book(report.job_id, directory.path, options.stall_timeout_s, terminal.say)
        self._stack.callback(self._book.close)
        self._observers = Observers(terminal.say, [self._book])
        self._testimony: Testimony | None = None
        self._store: StoreProcess | None = None
        self._starting: Future[StoreProcess] | None = None

    def start_store(self, secret: str) -> None:
        """Start the store, and write the job file that other programs use to find the job.

        Raises:
            LaunchError: the store does not start, or the job file cannot be written.
        """
        self._keep_store(self._make_store(secret), secret)

    def has_store(self, secret: str) -> bool:
        """Start the store in the background on the first call; return whether the store is ready.

        Raises:
            LaunchError: the store does not start, or the job file cannot be written.
        """
        if self._store is None and self._starting is None:
            pool = ThreadPoolExecutor(1, "echelon-store")
            self._starting = pool.submit(self._make_store, secret)
            pool.shutdown(wait=False)
        elif self._starting is not None and self._starting.done():
            self._keep_store(self._starting.result(), secret)
            self._starting = None
        return self._store is not None

    def _make_store(self, secret: str) -> StoreProcess:
        meeting = self._options.rendezvous
        bind = _LOOPBACK if meeting is None else meeting.bind
        host = _LOOPBACK if meeting is None else meeting.host
        return StoreProcess(bind, host, secret)

    def _keep_store(self, store: StoreProcess, secret: str) -> None:
        meeting, host = self._options.rendezvous, store.host
        self._stack.callback(store.close)
        job_id = self.report.job_id
        job = {"endpoint": f"{host}:{store.port}", "secret": secret, "job_id": job_id}
        if meeting is not None:
            job["rendezvous"] = meeting.address  # by which `echelon status` finds the secret
        self._directory.write_job(job)
        self._stack.callback(self._directory.forget_secret, job)
        self._store = store

    def begin(self, succession: Succession | None = None) -> None:
        """Create the coordinator. The store must be running."""
        assert self._store is not None
        self.succession = succession
        options, shown = self._options, str(self._directory.shown)
        outside = Outside(
            options.notify, options.metrics, options.otlp, shown, self._book, self.say
        )
        self._stack.callback(outside.close)
        self._observers = Observers(self.say, [self._book, outside])
        self.coordinator = Coordinator(
            self._options, self._directory, self.report, self._store, self.send, self._terminal,
            succession, self._observers,
        )  # fmt: skip
        self._stack.callback(self.coordinator.close)

    def call_witness(self, mandate: Mandate) -> None:
        """Connect to the witness, if the job has one, so that `send` can send commands to it."""
        if not mandate.witness:
            return
        from echelon.launcher.election.testimony import Testimony  # gRPC only where needed

        meeting = self._options.rendezvous
        assert meeting is not None
        self._testimony = Testimony(mandate, meeting.secret, self._options.tls, self.events)
        self._stack.callback(self._testimony.close)

    def send(self, node: str, command: m.Command) -> None:
        """Send a command to a node or the witness. Never blocks."""
        if node == self._options.node_name:
            self.link.commands.put(command)
        elif node == WITNESS:
            if self._testimony is not None:
                self._testimony.send(command)
        elif self.server is not None:
            self.server.send(node, command)
            if isinstance(command, m.Over):
                self.server.hang_up(node)

    def write_report(self) -> None:
        """Write report.json. If the file cannot be written, the job is not affected."""
        try:
            self.report.write(self._directory.report_file)
        except OSError as err:
            self._terminal.say(f"cannot write report.json: {err.strerror or err}")
        if not self._book.job.ended_by:  # the coordinator did not conclude the job
            report = self.report
            self._observers.tell(
                JobEnded(
                    ended_by=report.ended_by.value, exit_code=report.exit_code, error=report.error
                )
            )

    def close(self) -> None:
        """Stop the coordinator, the store and all other services that this object started."""
        if self._starting is not None:
            self._starting.add_done_callback(_close_store)
        self._stack.close()


def _close_store(starting: Future[StoreProcess]) -> None:
    if starting.exception() is None:
        starting.result().close()
