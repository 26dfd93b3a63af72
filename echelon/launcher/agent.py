"""The agent: one loop over the workers' output, the guard's news, the rings and the clock.

It decides nothing itself: `decide.Attempt` does, this acts. Everything runs on one thread. What the
agent starts (guard, store) ends with it, also when it is killed: both hold the other end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from echelon.errors import DumpFormatError, LaunchError
from echelon.launcher import decide, environment
from echelon.launcher.explain import explain
from echelon.launcher.harvest import Occasion, Worker, harvest
from echelon.launcher.meeting import StoreProcess
from echelon.launcher.options import Options
from echelon.launcher.output import Stream, Terminal
from echelon.launcher.report import EXIT_STALL, Incident, Report, exit_code
from echelon.launcher.rundir import RunDirectory, write_json
from echelon.launcher.workers import Exited, Failed, Started, Swept, Workers
from echelon.recorder.read import LiveRing
from echelon.recorder.schema import Live
from echelon.recorder.signals import oom_kills
from echelon.recorder.watchdog import Sight, StallRule

_LOOP_S = 0.5
_DRAIN_S = 1.0  # for what ended workers left in their pipes
_SWEEP_S = 2.0
_NOT_STARTED = 127
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # the user's own: Slurm, Lightning
_HOST = "127.0.0.1"


def run(options: Options) -> int:
    """Run a job to its end; return the launcher's exit code.

    Raises:
        LaunchError: it cannot be started.
    """
    job_id = options.rdzv_id or secrets.token_hex(4)
    directory = RunDirectory(options.run_dir, options.rdzv_id)
    report = Report(job_id=job_id, world_size=options.nproc_per_node)
    secret = secrets.token_hex(32)
    with (
        contextlib.closing(Workers()) as guard,
        contextlib.closing(StoreProcess(_HOST, secret)) as store,
        _caught_signals() as signals,
    ):
        job = {"endpoint": f"{store.host}:{store.port}", "secret": secret, "job_id": job_id}
        write_json(directory.job_file, job)
        agent = _Agent(options, directory, report, guard, store, signals)
        try:
            agent.run()
        except LaunchError as err:
            report.ended_by, report.exit_code = decide.EndedBy.AGENT, 1
            report.error = str(err)
            _say(f"ended: {err}")
        finally:
            agent.close()
            report.write(directory.path / "report.json", agent.workers)
    return report.exit_code


class _Agent:
    """One job on one node."""

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        report: Report,
        guard: Workers,
        store: StoreProcess,
        signals: int,
    ) -> None:
        self._options = options
        self._directory = directory
        self._report = report
        self._guard = guard
        self._store = store
        self._signals = signals
        self._terminal = Terminal()
        self._selector = selectors.DefaultSelector()
        self._selector.register(guard.fileno(), selectors.EVENT_READ, self._take_news)
        self._selector.register(signals, selectors.EVENT_READ, self._take_signals)
        self._streams: dict[int, Stream] = {}
        self._rings: dict[int, LiveRing] = {}
        self._events: list[decide.Event] = []
        self._num_ended = 0
        self._swept: int | None = None
        self._oom_kills_before = oom_kills(os.getpid())
        self._first_attempt = directory.next_attempt()
        self._number = self._first_attempt
        self.workers: list[Worker] = []

    def run(self) -> None:
        """Run attempts until one ends well or none is left, and settle the exit code."""
        started_s = time.monotonic()
        _say(f"{self._options.nproc_per_node} ranks; run directory {self._directory.shown}")
        while True:
            end, stop_signal = self._run_attempt()
            self._report.attempts += 1
            self._clear_up()
            restart = self._number - self._first_attempt
            if not end.failed or end.ended_by is not decide.EndedBy.WORKER:
                break
            if restart >= self._options.max_restarts:
                break
            _say(f"restart {restart + 1} of {self._options.max_restarts}")
            self._number += 1
        self._conclude(end, stop_signal, time.monotonic() - started_s)

    def close(self) -> None:
        """Close pipes, files and mappings."""
        for stream in list(self._streams.values()):
            self._drop(stream)
        self._close_rings()
        self._selector.close()

    # ---- one attempt ----

    def _run_attempt(self) -> tuple[decide.EndAttempt, int]:
        attempt = decide.Attempt(
            self._options.nproc_per_node,
            grace_s=self._options.shutdown_timeout_s,
            stop_on_stall=self._options.on_stall == "stop",
        )
        self._start_workers()
        rule = StallRule(self._options.stall_timeout_s, time.monotonic_ns())
        look_s = min(_LOOP_S, self._options.stall_timeout_s / 5)
        while True:
            until = time.monotonic() + look_s
            if attempt.deadline_s is not None:
                until = min(until, attempt.deadline_s)
            self._pump(max(0.0, until - time.monotonic()))
            self._look_for_stall(rule)
            for event in [*self._take_events(), decide.TimePassed()]:
                for action in attempt.on(event, time.monotonic()):
                    if isinstance(action, decide.EndAttempt):
                        return action, attempt.stop_signal
                    self._act(action)

    def _start_workers(self) -> None:
        options = self._options
        self._num_ended = 0
        attempt = environment.Attempt(
            number=self._number,
            restart=self._number - self._first_attempt,
            max_restarts=options.max_restarts,
            job_id=self._report.job_id,
            world_size=options.nproc_per_node,
            master_addr=self._store.host,
            master_port=self._store.port,
            job_file=self._directory.job_file,
            recorder_size=options.recorder_size,
            terminal_columns=self._terminal.columns,
        )
        self.workers = []
        for rank in range(options.nproc_per_node):
            folder = self._directory.make_rank_dir(rank, self._number)
            env = environment.worker_environment(os.environ, attempt, rank, folder)
            self.workers.append(Worker(rank=rank, folder=folder))
            pipes = self._guard.spawn(rank, options.program, env, str(Path.cwd()))
            for number, pipe in enumerate(pipes, start=1):
                self._add_stream(rank, number, pipe, folder)

    def _add_stream(self, rank: int, number: int, pipe: int, folder: Path) -> None:
        log = folder / ("stdout.log" if number == 1 else "stderr.log")
        stream = Stream(pipe, number, b"%d| " % rank, log.open("wb"), self._terminal)
        self._streams[pipe] = stream
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    def _act(self, action: decide.Action) -> None:
        if isinstance(action, decide.CollectIncident):
            self._collect(action)
        elif isinstance(action, decide.SignalWorkers):
            for worker in self.workers:
                if worker.exit_code is None:
                    worker.stopped_by_agent = True
                    self._guard.signal(worker.rank, action.number)

    # ---- what comes in ----

    def _pump(self, timeout_s: float) -> None:
        """Pass on output and take in news, for at most this long."""
        for key, _ in self._selector.select(timeout_s):
            if not isinstance(key.data, Stream):
                key.data()
            elif not key.data.pump():
                self._drop(key.data)

    def _take_signals(self) -> None:
        for number in os.read(self._signals, 256):
            if number in _STOPPING_SIGNALS:
                self._events.append(decide.StopRequested(number))
            else:
                for worker in self.workers:
                    self._guard.signal(worker.rank, number)

    def _take_news(self) -> None:
        for news in self._guard.events():
            if isinstance(news, Started):
                self.workers[news.index].pid = news.pid
            elif isinstance(news, Failed):
                worker = self.workers[news.index]
                worker.start_error = news.error
                _say(f"rank {news.index}: cannot run {news.error}")
                self._note_end(worker, _NOT_STARTED, time.monotonic_ns())
            elif isinstance(news, Exited):
                self._note_end(self.workers[news.index], news.code, news.mono_ns)
            elif isinstance(news, Swept):
                self._swept = news.count

    def _note_end(self, worker: Worker, code: int, mono_ns: int) -> None:
        worker.exit_code = code
        worker.exited_mono_ns = mono_ns
        worker.exit_order = self._num_ended
        self._num_ended += 1
        self._events.append(decide.WorkerEnded(worker.rank, code))

    def _take_events(self) -> list[decide.Event]:
        events, self._events = self._events, []
        return events

    def _drop(self, stream: Stream) -> None:
        self._selector.unregister(stream.pipe)
        del self._streams[stream.pipe]
        stream.close()

    # ---- stalls ----

    def _look_for_stall(self, rule: StallRule) -> None:
        was_stalled = rule.is_stalled
        sights = [self._sight(worker) for worker in self.workers if worker.alive]
        stall = rule.look(sights, time.monotonic_ns())
        if was_stalled and not rule.is_stalled:
            for incident in self._report.incidents[-1:]:
                incident.recovered = True
            _say("the stall is over: the ranks make progress again")
        if stall is not None:
            self._events.append(decide.StallSeen(stall.reason))

    def _sight(self, worker: Worker) -> Sight:
        ring = self._rings.get(worker.rank)
        if ring is None:
            try:
                ring = self._rings[worker.rank] = LiveRing(worker.folder / "ring")
            except DumpFormatError:
                return Sight(rank=worker.rank)  # it has not opened one yet
        words = ring.words()
        pending_mono_ns, num_pending = ring.pending()
        ended = words[Live.NUM_OPERATIONS] - num_pending + words[Live.NUM_SPANS] + words[Live.STEP]
        return Sight(
            rank=worker.rank,
            initialised=bool(words[Live.INITIALISED]),
            progress_mono_ns=words[Live.PROGRESS_MONO_NS],
            pending_mono_ns=pending_mono_ns,
            num_ended=ended,
        )

    def _collect(self, action: decide.CollectIncident) -> None:
        self._terminal.end_live()
        _say(f"{action.kind}: {action.reason}; collecting the black boxes")
        occasion = Occasion(
            kind=action.kind,
            attempt=self._number,
            world_size=self._report.world_size,
            reason=action.reason,
            job_id=self._report.job_id,
            oom_kills_before=self._oom_kills_before,
        )
        try:
            folder = harvest(self._directory, self.workers, occasion, self._pump)
        except OSError as err:
            _say(f"the incident was not kept: {err}")
            return
        incident = Incident(folder, action.kind, self._number, action.reason)
        self._report.incidents.append(incident)
        if action.kind == "stall" and self._options.on_stall == "report":
            self._explain(incident)

    # ---- the end ----

    def _clear_up(self) -> None:
        """End what workers left behind, and take the rest of their output."""
        deadline_s = time.monotonic() + _SWEEP_S
        while self._swept != 0 and time.monotonic() < deadline_s:
            self._swept = None
            self._guard.sweep(signal.SIGKILL)
            while self._swept is None and time.monotonic() < deadline_s:
                self._pump(0.05)
        self._swept = None
        deadline_s = time.monotonic() + _DRAIN_S
        while self._streams and time.monotonic() < deadline_s:
            self._pump(0.05)
        for stream in list(self._streams.values()):
            stream.flush()
            self._drop(stream)
        self._terminal.end_live()
        self._close_rings()
        for incident in self._report.incidents:
            if not incident.explained:
                self._explain(incident)

    def _explain(self, incident: Incident) -> None:
        incident.explained = True
        shown = self._directory.shown / "dump" / incident.folder.name
        incident.verdict = explain(incident.folder, shown)

    def _close_rings(self) -> None:
        while self._rings:
            self._rings.popitem()[1].close()

    def _conclude(self, end: decide.EndAttempt, stop_signal: int, elapsed_s: float) -> None:
        report = self._report
        report.ended_by = end.ended_by
        if not end.failed:
            for incident in report.incidents:
                incident.recovered = True
            _say(f"all {report.world_size} ranks ended well after {elapsed_s:.1f} s")
        elif end.ended_by is decide.EndedBy.STALL:
            report.exit_code = EXIT_STALL
        elif end.ended_by is decide.EndedBy.SIGNAL:
            report.exit_code = 128 + stop_signal
        else:
            last = report.incidents[-1].verdict if report.incidents else None
            report.exit_code = exit_code(self.workers, last) or 1


@contextlib.contextmanager
def _caught_signals() -> Iterator[int]:
    """Turn signals into bytes on a pipe, one a signal; yield its read end."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = [*_STOPPING_SIGNALS, *_PASSED_SIGNALS]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
