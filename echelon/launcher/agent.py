"""Run the agent, which is the event loop of one node.

Every node runs one agent. The agent on the node that owns the endpoint also hosts the coordinator
and the store.

The agent is single-threaded, except for the gRPC links of multi-node jobs. The guard and the store
exit when the agent exits, even if the agent is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.control.conf import beat_s
from echelon.launcher.control.endpoint import join
from echelon.launcher.control.link import Link, Mailbox
from echelon.launcher.coordinator import decide
from echelon.launcher.hosting import Hosting
from echelon.launcher.incident.explain import explain_now
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.node import NodeAgent
from echelon.launcher.node.patience import UNKILLABLE_S, Asked, UserRequest
from echelon.launcher.node.workers import Workers
from echelon.launcher.options.options import Options
from echelon.launcher.output.output import Terminal
from echelon.launcher.shortage import is_shortage, raise_descriptor_limit
from echelon.recorder.continuation import REPLACE, SHRINK

if TYPE_CHECKING:  # gRPC only where several nodes need it
    from echelon.launcher.election.standby import Standby
    from echelon.launcher.failover import Failover

_LOOP_S = 0.5
_EXPLAIN_S = 10.0
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # the user's own: Slurm, Lightning


def run(options: Options) -> int:
    """Run this node's part of a job until the job ends; return the launcher's exit code.

    Raises:
        LaunchError: the job cannot be started.
    """
    meeting = options.rendezvous
    is_host = meeting is None or meeting.is_host
    directory = RunDirectory(
        options.run_dir, options.rdzv_id, node="" if is_host else options.node_name
    )
    links = 0 if meeting is None else max(1, options.min_nodes if is_host else 1)
    raise_descriptor_limit(options.nproc_per_node, links)
    terminal = Terminal(as_json=options.logs.as_json, fold=options.logs.fold)
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(contextlib.closing(Workers()))
        signals = stack.enter_context(_caught_signals({*options.signals, *_PASSED_SIGNALS}))
        for note in options.notes:
            terminal.say(note)
        if is_host:
            return _host(options, directory, guard, signals, terminal, stack)
        return _take_part(options, directory, guard, signals, terminal, stack)


def _host(
    options: Options,
    directory: RunDirectory,
    guard: Workers,
    signals: int,
    terminal: Terminal,
    stack: contextlib.ExitStack,
) -> int:
    """Host the job: run the coordinator, the store and this node's workers.

    Return the job's exit code.
    """
    meeting = options.rendezvous
    report = Report(job_id=options.rdzv_id or secrets.token_hex(4), world_size=0)
    secret = secrets.token_hex(32) if meeting is None else meeting.secret.decode()
    standby = None
    if meeting is not None and options.conf.failover:
        standby = _standby(options, meeting.bind_address, is_open=True)
        stack.callback(standby.close)
    events = Mailbox() if standby is None else standby.events
    stack.callback(events.close)
    hosting = Hosting(options, directory, report, terminal, events)
    stack.callback(hosting.close)
    directory.forget_report()
    hosting.start_store(secret)
    if standby is not None:
        hosting.server = standby.server
        stack.callback(standby.server.close)
    elif meeting is not None:
        from echelon.launcher.control.server import ControlServer  # gRPC only where needed

        hosting.server = ControlServer(
            meeting.bind_address,
            meeting.secret,
            events,
            tls=options.tls,
            lost_after_s=options.conf.lost_after_s,
            beat_s=beat_s(options.max_nodes, options.conf.lost_after_s),
        )
        stack.callback(hosting.server.close)
    if meeting is not None and options.tls is None and not meeting.stays_here:
        terminal.say("control messages are authenticated but not encrypted; see --rdzv-cert")
    failover = None
    succession = None
    if standby is not None:
        from echelon.launcher.failover import Failover, first_succession

        succession = first_succession(options, standby, hosting, report.job_id)
        failover = Failover(options, directory, terminal, standby, guard, _hello(options), hosting)
    hosting.begin(succession)
    link = hosting.link
    agent = _Agent(options, directory, guard, signals, link, terminal, hosting, failover)
    link.send(_hello(options))
    terminal.say(
        f"{_ranks(options)}{_nodes(options)}; run directory {directory.shown}"
        f"{agent.where_rings_lie}"
    )
    try:
        agent.run()
    except Exception as err:
        report.ended_by, report.exit_code = decide.EndedBy.AGENT, 1
        report.error = str(err) if isinstance(err, LaunchError) else f"{type(err).__name__}: {err}"
        terminal.say(f"ended: {report.error}")
        if not isinstance(err, LaunchError | OSError) and not is_shortage(err):
            raise  # a bug in the launcher: show its traceback
    finally:
        agent.close()
        hosting.write_report()
    return report.exit_code


def _standby(options: Options, bind_address: str, *, is_open: bool) -> Standby:
    from echelon.launcher.election.standby import Standby  # gRPC only where needed

    assert options.rendezvous is not None
    return Standby(
        options.node_name,
        bind_address,
        options.rendezvous.secret,
        promise_s=options.conf.lost_after_s,
        tls=options.tls,
        is_open=is_open,
    )


def _take_part(
    options: Options,
    directory: RunDirectory,
    guard: Workers,
    signals: int,
    terminal: Terminal,
    stack: contextlib.ExitStack,
) -> int:
    """Run this node's workers under a coordinator that runs on another node.

    Return this launcher's exit code.
    """
    from echelon.launcher.control.client import GrpcLink  # gRPC only where needed

    meeting = options.rendezvous
    assert meeting is not None
    secret = meeting.secret.decode()
    job = {"rendezvous": meeting.address, "secret": secret}
    directory.write_job(job)
    stack.callback(directory.remove_own_job)
    hello, failover = _hello(options), None
    if options.conf.failover:
        from echelon.launcher.failover import Failover

        everywhere = "::" if ":" in meeting.host else meeting.bind
        standby = _standby(options, join(everywhere, 0), is_open=False)
        stack.callback(standby.close)
        hello = replace(hello, port=standby.server.port)
        failover = Failover(options, directory, terminal, standby, guard, hello)
    link = GrpcLink(
        meeting.address,
        meeting.secret,
        hello,
        options.conf.join_timeout_s,
        tls=options.tls,
        lost_after_s=options.conf.lost_after_s,
        is_last=failover is None,
    )
    agent = _Agent(options, directory, guard, signals, link, terminal, None, failover)
    stack.callback(agent.close_link)
    terminal.say(f"joining {meeting.address} with {_ranks(options)}")
    try:
        agent.run()
    except (LaunchError, OSError, RuntimeError) as err:
        if isinstance(err, RuntimeError) and not is_shortage(err):
            raise
        terminal.say(f"ended: {err}")
        return 1
    finally:
        agent.close()
        if agent.hosting is not None:
            agent.hosting.write_report()
            agent.hosting.close()
    if agent.over is None:
        why = f"lost the coordinator node ({agent.lost_because})"
        if options.on_loss in (SHRINK, REPLACE):
            why += f"; --on-loss {options.on_loss} does not cover that: the job's store was there"
        return _leave_alone(agent, directory, terminal, why)
    if agent.over.text:
        terminal.say(agent.over.text)
    return agent.over.exit_code


def _leave_alone(agent: _Agent, directory: RunDirectory, terminal: Terminal, why: str) -> int:
    terminal.say(why)
    if agent.own_incident is not None:
        shown = directory.shown / "dump" / agent.own_incident.name
        terminal.write_error(explain_now(agent.own_incident, shown, terminal.error_columns).text)
    return 1


class _Agent:
    """The event loop of one node."""

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        guard: Workers,
        signals: int,
        link: Link,
        terminal: Terminal,
        hosting: Hosting | None,
        failover: Failover | None,
    ) -> None:
        self._options = options
        self._signals = signals
        self._link = link
        self._terminal = terminal
        self.hosting = hosting
        self._failover = failover
        self.lost_because = ""
        self._user = UserRequest()
        self._selector = selectors.DefaultSelector()
        self._node = NodeAgent(
            options, directory, guard, self._selector, self._tell, terminal, self._pump
        )
        self._register(signals, self._take_signals)
        self._register(link.fileno(), lambda: None)  # wakes the loop; taken between pumps
        if hosting is not None:
            self._register(hosting.events.fileno(), lambda: None)
        self.over: m.Over | None = None
        self.own_incident: Path | None = None

    @property
    def where_rings_lie(self) -> str:
        """A phrase that tells the user where the rings are; "" if they are in the run directory."""
        return self._node.where_rings_lie

    def run(self) -> None:
        """Run the event loop until the job ends or the coordinator is lost."""
        look_s = min(_LOOP_S, self._options.stall_timeout_s / 5)
        self._next_reason_s = time.monotonic() + _EXPLAIN_S
        next_look_s = 0.0
        while self.over is None:
            if not self._obey() or not self._seek():
                self._stop_alone("coordinator node lost")
                return
            if self._user.deadline_s() <= time.monotonic():
                self._terminal.say(
                    "the coordinator is not responding; this node is stopping on its own"
                )
                self._stop_alone("stopped by the user")
                self._end_as_asked()
                return
            until = self._coordinate()
            self._explain_dialling()
            if time.monotonic() >= next_look_s:
                self._node.look()
                next_look_s = time.monotonic() + look_s
            self._node.tick()
            until = min(until, next_look_s, self._node.deadline_s(), self._user.deadline_s())
            self._pump(max(0.0, until - time.monotonic()))

    def _explain_dialling(self) -> None:
        """Print why the coordinator is unreachable: first after 10 s, then every 40 s."""
        now_s = time.monotonic()
        if self._link.is_connected or now_s < self._next_reason_s:
            return
        self._next_reason_s = now_s + 4 * _EXPLAIN_S
        why = getattr(self._link, "last_error", "") or "no answer yet"
        self._terminal.say(f"still trying to reach the coordinator: {why}")

    def _coordinate(self) -> float:
        """Run one step of the failover and one step of the coordinator, if this node runs them.

        Return the `time.monotonic` time at which to call this method again.
        """
        due = float("inf")
        if self._failover is not None:
            self._failover.step(self._node)
            due = self._failover.deadline_s()
        coordinator = None if self.hosting is None else self.hosting.coordinator
        if self.hosting is None or coordinator is None:
            return due
        for name, event in self.hosting.events.take():
            coordinator.take(name, event)
        coordinator.step()
        return min(due, coordinator.deadline_s())

    def _tell(self, event: m.Event) -> None:
        self._link.send(event)

    def _seek(self) -> bool:
        """Continue the search for a new hosting node, if one is in progress.

        Return False once the search has failed.
        """
        failover = self._failover
        if failover is None or not failover.is_seeking:
            return True
        if failover.has_given_up:
            return False
        link = failover.seek(self._node)
        if link is not None:
            self._replace_link(link)
            failover.greet(link, self._node)
        return True

    def _replace_link(self, link: Link) -> None:
        former = self._link
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(former.fileno())
        # A link that is not connected may take seconds to close.
        threading.Thread(target=former.close, name="echelon-hang-up", daemon=True).start()
        if self._failover is not None and self._failover.hosting is not self.hosting:
            if self.hosting is None:  # later hostings of this node use the same mailbox
                assert self._failover.hosting is not None
                self._register(self._failover.hosting.events.fileno(), lambda: None)
            self.hosting = self._failover.hosting
        self._link = link
        self._register(link.fileno(), lambda: None)

    def close_link(self) -> None:
        """Close the link to the coordinator."""
        self._link.close()

    def close(self) -> None:
        """Release the resources of the event loop."""
        self._node.close()
        self._selector.close()

    def _register(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _pump(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for events, such as output or signals, and handle them."""
        ready = [key for key, _ in self._selector.select(timeout_s)]
        # The user's signals come first: ranks that received the same signal have not failed.
        ready.sort(key=lambda key: key.fd != self._signals)
        for key in ready:
            key.data()
        if self.hosting is not None and self.hosting.succession is not None:
            self.hosting.succession.step()  # also while this node clears up

    def _take_signals(self) -> None:
        for number in os.read(self._signals, 256):
            if number not in _STOPPING_SIGNALS:
                self._node.pass_on(number)
                continue
            asked = self._user.on(number, time.monotonic())
            if asked is Asked.HURRY:
                self._terminal.say("interrupted again: killing this node's workers now")
                self._node.kill()
            elif asked is Asked.STOP:
                if self._link.is_connected:
                    self._link.send(m.StopAsked(number=number))
                else:
                    self._end_as_asked()

    def _end_as_asked(self) -> None:
        code = 128 + self._user.first
        self.over = m.Over(exit_code=code, ended_by=decide.EndedBy.SIGNAL.value)

    def _obey(self) -> bool:
        """Execute the coordinator's commands.

        Return False if the coordinator is lost and this node must stop without it.
        """
        for command in self._link.take():
            if command is None:
                why = getattr(self._link, "lost_because", "")
                return self.over is not None or self._lose_host(why)
            self._obey_one(command)
        if self._failover is not None and self._failover.is_overdue() and self.over is None:
            return self._lose_host("no heartbeat in time")
        return True

    def _lose_host(self, why: str) -> bool:
        """Handle the loss of the coordinator.

        Return whether this node can still find a new hosting node.
        """
        self.lost_because = why
        failover = self._failover
        if failover is None or self._user.first:
            return False
        return failover.lose_host(self.lost_because, self._node)

    def _obey_one(self, command: m.Command) -> None:
        node = self._node
        if self._failover is not None and self._failover.on_command(command, self._link, node):
            return
        if isinstance(command, m.Start):
            node.start(command)
        elif isinstance(command, m.Stop):
            self._user.answer()
            node.stop(command)
        elif isinstance(command, m.Kill):
            node.kill()
        elif isinstance(command, m.KillRanks):
            node.kill_ranks(command)
        elif isinstance(command, m.Replace):
            node.replace(command)
        elif isinstance(command, m.Collect):
            node.collect(command)
        elif isinstance(command, m.ClearUp):
            node.clear_up()
        elif isinstance(command, m.Show):
            self._terminal.write_error(command.text)
        elif isinstance(command, m.TellStatus):
            node.tell_status(command.visitor)
        elif isinstance(command, m.Probe):
            node.probes.begin(command)
        elif isinstance(command, m.Over):
            self.over = command

    def _stop_alone(self, why: str) -> None:
        """Save this node's diagnostics and stop its workers, because the coordinator is lost.

        The workers get the usual grace period to save their state.
        """
        if not self._node.has_workers and not self._node.has_snapshot:
            return
        with contextlib.suppress(OSError):
            self.own_incident = self._node.collect_alone(why)
        grace_ms = int(self._options.shutdown_timeout_s * 1000)
        self._node.stop(m.Stop(number=signal.SIGTERM, grace_ms=grace_ms, urgent=True))
        deadline_s = time.monotonic() + grace_ms / 1e3 + UNKILLABLE_S + _LOOP_S
        while self._node.has_workers and time.monotonic() < deadline_s:
            self._node.tick()
            until = min(deadline_s, self._node.deadline_s(), time.monotonic() + _LOOP_S)
            self._pump(max(0.0, until - time.monotonic()))
        self._node.clear_up()


def _hello(options: Options) -> m.Hello:
    return m.Hello(
        node=options.node_name,
        host=socket.gethostname(),
        num_workers=options.nproc_per_node,
        node_rank=options.node_rank,
    )


def _ranks(options: Options) -> str:
    return "1 rank" if options.nproc_per_node == 1 else f"{options.nproc_per_node} ranks"


def _nodes(options: Options) -> str:
    low, high = options.min_nodes, options.max_nodes
    if options.rendezvous is None:
        return ""
    return f" on each of {low if low == high else f'{low} to {high}'} nodes"


@contextlib.contextmanager
def _caught_signals(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """Catch the given signals, except those already ignored; yield the read end of a pipe.

    The number of each caught signal is written to the pipe as one byte. After the context exits,
    the caught signals are ignored, so that a repeated signal cannot change the job's exit code.
    """
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # An ignored signal stays ignored: nohup, or a shell's background job.
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup)
        os.close(read_end)
        os.close(write_end)
