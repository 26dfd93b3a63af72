"""Run a job's workers on one node, and handle their output and rings.

The node agent carries out commands and reports events. It has no information about other nodes. Its
only decision is how long to wait for its workers to stop. Events are sent to the coordinator
through `tell`. No method blocks the agent's loop for long, because incidents are collected step by
step in `tick`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from echelon.errors import DumpFormatError, LaunchError
from echelon.host.accelerators import visible_to
from echelon.host.process import oom_kills
from echelon.launcher.control import messages as m
from echelon.launcher.goodput.reporting import LapReports
from echelon.launcher.incident.harvest import harvest, second_look_s
from echelon.launcher.incident.torch_dumps import TorchDump, torch_environment
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.limits.kept import LimitsFile
from echelon.launcher.node import environment
from echelon.launcher.node.binding import bind, describe
from echelon.launcher.node.containment import Containment
from echelon.launcher.node.examination import Examination, keep_alone
from echelon.launcher.node.hook import FIRST_INDEX, Hook
from echelon.launcher.node.patience import UNKILLABLE_S, Due, Grace
from echelon.launcher.node.probes import Probes
from echelon.launcher.node.ringmemory import RingMemory
from echelon.launcher.node.sighting import Sighting
from echelon.launcher.node.standby.pool import FIRST_STANDBY, Standbys
from echelon.launcher.node.standby.waiting import Waiting
from echelon.launcher.node.standings import Standings
from echelon.launcher.node.unkillable import why_it_lives
from echelon.launcher.node.workers import Exited, Failed, Started, Swept, Workers
from echelon.launcher.options.options import Options
from echelon.launcher.output.output import Source, Stream, Terminal
from echelon.launcher.status.status import RankStatus, silent, status_of
from echelon.recorder.format.schema import Live, Record
from echelon.recorder.read import read_ring
from echelon.recorder.write.setup.modules import STEADY_STEPS

_DRAIN_S = 1.0  # for the output that ended workers left in their pipes
_SWEEP_S = 2.0
_NOT_STARTED = 127
_LIMITS_S = 10.0  # between two writes of the learned limits
_STEADY_S = 30.0  # after which an attempt without steps is in its steady state
_CALM_S = 5.0  # without ranks, as on a spare node, after which standbys may load


class NodeAgent:
    """The agent that runs this node's workers. Each `Start` command begins an attempt."""

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        guard: Workers,
        selector: selectors.BaseSelector,
        tell: Callable[[m.Event], None],
        terminal: Terminal,
        pump: Callable[[float], None],
    ) -> None:
        self._options = options
        self._directory = directory
        self._guard = guard
        self._selector = selector
        self._tell = tell
        self._say = terminal.say
        self._pump = pump
        self._terminal = terminal
        self._job_logs = f"{options.rdzv_id or 'none'}_{secrets.token_hex(4)}"
        self._selector.register(guard.fileno(), selectors.EVENT_READ, self._take_news)
        self._streams: dict[int, Stream] = {}
        self._has_lost_output = False
        self._next_limits_s = 0.0
        self._limits_file = LimitsFile()
        self._sighting: Sighting | None = None
        self._laps: LapReports | None = None
        self._standings: Standings | None = None
        self._grace = Grace()
        self._hung: frozenset[int] = frozenset()  # ranks with a short grace period
        self._examination: Examination | None = None
        self._kept: Sequence[Record] | None = None  # a snapshot that no coordinator has requested
        self._stop_after_examination: m.Stop | None = None
        self._denied: list[int] = []
        self._containment = Containment()
        self._workers: list[Worker] = []
        self._hook: Hook | None = None
        self._standbys = Standbys(options.standby, options.program, guard, selector, self._say)
        self._taken: dict[int, tuple[Waiting, dict[str, str], str]] = {}  # until they are ranks
        self._calm_since_s = time.monotonic()
        self._started_s = 0.0
        self.probes = Probes(directory.path, selector, tell)
        self._not_started = range(0)  # ranks whose attempt ended before they started
        self._start: m.Start | None = None
        self._shared: environment.Attempt | None = None  # what the ranks of the attempt share
        self._num_replaced = 0
        self._num_ended = 0
        self._swept: int | None = None
        self._oom_kills_before = oom_kills(os.getpid())
        self._processors = self._bind()
        self._memory = RingMemory.for_run(directory.path, options)
        if self._memory.folder is not None:
            guard.hold(str(self._memory.folder))
        if options.standby:
            self._prepare_before_start()

    def _bind(self) -> Sequence[frozenset[int] | None]:
        """Return the processors that each worker is allowed to use; None means all processors.

        Raises:
            LaunchError: there are too few processors or too few GPUs.
        """
        options = self._options
        if options.virtual_local_rank:
            try:
                visible_to(options.nproc_per_node - 1, os.environ)
            except ValueError as err:
                raise LaunchError(str(err)) from None
        if not options.numa_binding:
            return [None] * options.nproc_per_node
        processors = bind(options.numa_binding, options.nproc_per_node, os.environ)
        self._say(describe(options.numa_binding, processors))
        return processors

    @property
    def where_rings_lie(self) -> str:
        """A phrase that describes where the rings are; "" if they are in the run directory."""
        return str(self._memory)

    @property
    def has_workers(self) -> bool:
        """True while at least one worker has not ended."""
        return any(worker.exit_code is None for worker in self._workers)

    def deadline_s(self) -> float:
        """Return the time by which `tick` must be called."""
        due = [self._terminal.deadline_s or float("inf"), self.probes.deadline_s()]
        if self._examination is not None:
            due.append(self._examination.due_s)
        if self._hook is not None:
            due.append(self._hook.due_s)
        if self.has_workers:
            due.append(self._grace.deadline_s())
        return min(due)

    def tick(self) -> None:
        """Carry out the work that is due.

        This includes showing delayed output, continuing a snapshot in progress, killing workers
        whose grace period has ended, and starting standbys.
        """
        self._terminal.tick()
        self.probes.tick()
        if self._hook is not None and self._hook.tick(time.monotonic()):
            self._end_hook(-signal.SIGKILL)
        if self._examination is not None and time.monotonic() >= self._examination.due_s:
            self._examine_on()
        if self._grace.is_running and self.has_workers:
            self._check_grace()
        self._standbys.tick()
        if self._standbys.wants_more and self._is_steady():
            self._standbys.start_next()

    def _is_steady(self) -> bool:
        """Return whether this node can start a standby without disturbing other work.

        Any running workers must have been running for a while, or each must have finished some
        steps. The node must be neither stopping workers nor taking a snapshot.
        """
        if self._examination is not None or self._hook is not None:
            return False
        if not self.has_workers:
            return time.monotonic() >= self._calm_since_s + _CALM_S and not self._has_succeeded()
        if self._grace.is_running or not all(worker.alive for worker in self._workers):
            return False
        if time.monotonic() >= self._started_s + _STEADY_S:
            return True
        return all(self._num_steps(worker) >= STEADY_STEPS for worker in self._workers)

    def _has_succeeded(self) -> bool:
        """Return whether all of this node's ranks have succeeded."""
        return bool(self._workers) and all(worker.exit_code == 0 for worker in self._workers)

    def _prepare_before_start(self) -> None:
        """Prepare standbys for the ranks that this node is likely to run in the first attempt."""
        per_node = self._options.nproc_per_node
        likely = m.Start(
            attempt=0,
            restart=0,
            max_restarts=self._options.max_restarts,
            job_id=self._options.rdzv_id,
            world_size=per_node * self._options.min_nodes,
            first_rank=0,
            num_workers=per_node,
            node_rank=0,
            num_nodes=self._options.min_nodes,
            master_addr="",
            master_port=0,
            stall_timeout_ms=0,
            torch_backend=self._options.torch_backend,
            on_loss=self._options.on_loss,
        )
        attempt = self._attempt(likely)
        folders = [self._directory.rank_dir(rank, attempt.number) for rank in attempt.ranks]
        ranks = [
            (self._environment(attempt, rank, folders[rank]), self._processors[rank])
            for rank in attempt.ranks
        ]
        self._standbys.prepare_for(ranks, folders[0] / environment.MODULES)

    def _environment(self, attempt: environment.Attempt, rank: int, folder: Path) -> dict[str, str]:
        env = environment.worker_environment(os.environ, attempt, rank, folder)
        env.update(self._memory.environment())
        env.update(torch_environment(env, folder))
        return env

    def _num_steps(self, worker: Worker) -> int:
        """Return how many steps a rank has finished in this attempt; 0 if unknown."""
        words = None if self._sighting is None else self._sighting.words(worker)
        if words is None or not words[Live.FIRST_STEP]:
            return 0
        return words[Live.STEP] - words[Live.FIRST_STEP]

    def replace(self, command: m.Replace) -> None:
        """Rename the folder of a rank that has ended, and start a process to replace the rank."""
        start, shared = self._start, self._shared
        if start is None or shared is None or command.attempt != self.attempt:
            return  # an earlier one
        local_rank = command.rank - start.first_rank
        old = self._workers[local_rank]
        if old.exit_code is None or self._grace.is_running:  # a stop has been faster
            self._tell(m.WorkerEnded(attempt=self.attempt, rank=command.rank, code=_NOT_STARTED))
            return
        self._num_replaced += 1
        self._set_aside(old)
        lives = {command.rank: command.life}
        joins = dataclasses.replace(shared, join_after=command.epoch, lives=lives)
        try:
            self._launch(start, joins, local_rank)
        except LaunchError as err:
            self._say(f"rank {command.rank}: {err}")
            self._note_not_started(command, str(err), old)
            return
        how = "a standby" if local_rank in self._taken else "a new process"
        self._say(f"{how} takes the place of rank {command.rank}")

    def _note_not_started(self, command: m.Replace, error: str, old: Worker) -> None:
        """Report that a lost rank's replacement could not be started."""
        worker = next(one for one in self._workers if one.rank == command.rank)
        if worker is not old:
            worker.start_error = error
            self._note_end(worker, _NOT_STARTED, time.monotonic_ns())
            return
        self._tell(
            m.WorkerEnded(
                attempt=command.attempt, rank=command.rank, code=_NOT_STARTED, error=error
            )
        )

    def _set_aside(self, worker: Worker) -> None:
        """Forget all observations of a lost rank, move its ring to disk, and rename its folder."""
        for known in (self._sighting, self._standings):
            if known is not None:
                known.forget(worker.rank)
        self._memory.bring_home(worker.folder)
        if worker.torch is not None:
            worker.torch.clear_up()
        self._directory.set_aside(worker.folder)

    # ---- commands ----

    def start(self, command: m.Start) -> None:
        """Start the workers. On a restart, run the `--before-restart` command first, if any."""
        self.probes.close()
        self._start = command
        self._kept = None
        self._num_replaced = 0
        self._next_limits_s = time.monotonic() + _LIMITS_S
        self._num_ended = 0
        self._grace = Grace()
        self._oom_kills_before = oom_kills(os.getpid())
        self._workers = []
        self._not_started = range(0)
        if not self._begin_hook(command):
            self._start_workers(command)

    def _begin_hook(self, command: m.Start) -> bool:
        """Start the user's command if this is a restart; return whether it was started."""
        text, limit_s = self._options.before_restart, self._options.before_restart_timeout_s
        if not (text and command.restart):
            return False
        try:
            self._hook = Hook(text, command, limit_s, self._guard, self._selector, self._say)
        except LaunchError as err:
            self._say(f"--before-restart: {err}; the workers start anyway")
        return self._hook is not None

    def _end_hook(self, code: int | None, error: str = "") -> None:
        """Start the workers after the user's command has ended."""
        hook, self._hook = self._hook, None
        assert hook is not None
        hook.note_end(code, error)
        self._start_workers(hook.start)

    def _give_up_start(self) -> None:
        """Cancel a start that is waiting for the `--before-restart` command.

        The ranks that were to be started are reported as having ended.
        """
        hook, self._hook = self._hook, None
        if hook is None:
            return
        hook.kill()
        hook.close()
        start = hook.start
        self._not_started = range(start.first_rank, start.first_rank + start.num_workers)
        for rank in self._not_started:
            self._tell(m.WorkerEnded(attempt=start.attempt, rank=rank, code=-signal.SIGTERM))

    def _start_workers(self, command: m.Start) -> None:
        attempt = self._shared = self._attempt(command)
        if command.num_nodes > 1:
            ranks = attempt.ranks
            here = f"rank {ranks[0]} runs" if len(ranks) == 1 else _ranks(ranks) + " run"
            what = f"starting {command.world_size} ranks"
            if command.join_after >= 0:
                what = "joining ranks that are already training"
            self._say(f"{what}; {here} on this node")
        self._sighting = Sighting(command, self._workers, self._num_printed)
        self._laps = LapReports(command, self._workers, self._sighting.words)
        self._standings = Standings(command, self._workers, self._tell)
        self._started_s = time.monotonic()
        assert not self._taken, self._taken
        ranks_here = [
            (self._launch(command, attempt, local_rank), self._processors[local_rank])
            for local_rank in range(len(attempt.ranks))
        ]
        self._standbys.prepare_for(ranks_here, self._workers[0].folder / environment.MODULES)
        if self._taken:
            self._say(f"started from standbys: {len(self._taken)} of {len(ranks_here)} ranks")

    def _launch(
        self, command: m.Start, attempt: environment.Attempt, local_rank: int
    ) -> dict[str, str]:
        """Start one rank, from a standby if possible; return the rank's environment.

        The new rank replaces any earlier rank with the same local rank. The rank's folder for this
        attempt must not exist yet.
        """
        rank = attempt.first_rank + local_rank
        folder = self._directory.make_rank_dir(rank, attempt.number)
        with contextlib.suppress(OSError):  # on a full disk, the worker finds no history
            (folder / "attempts.json").write_text(command.history)
        env = self._environment(attempt, rank, folder)
        worker = Worker(rank=rank, local_rank=local_rank, folder=folder, torch=TorchDump(env, rank))
        self._workers[local_rank : local_rank + 1] = [worker]
        logs = self._options.logs.folder(folder, self._job_logs, attempt.number, local_rank)
        with contextlib.suppress(OSError):  # opening the files will report the error
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        worker.logs = logs
        again = f"_{self._num_replaced}" if self._num_replaced else ""
        group = self._containment.group(f"rank_{rank}_attempt_{attempt.number}{again}")
        standby = self._standbys.take(env, self._processors[local_rank])
        if standby is None:
            pipes = self._spawn(local_rank, env, group)
        else:
            self._taken[local_rank] = standby, env, group
            self._guard.take(standby.index, local_rank, env, group=group)
            pipes = standby.pipes
        self._add_streams(pipes, command, local_rank)
        return env

    def _spawn(self, local_rank: int, env: dict[str, str], group: str) -> tuple[int, int]:
        """Start a rank's process; return the read ends of its stdout and stderr."""
        return self._guard.spawn(
            local_rank,
            self._options.program,
            env,
            str(Path.cwd()),
            self._processors[local_rank],
            group=group,
            has_stdin=self._workers[local_rank].rank == self._options.stdin_rank,
        )

    def _add_streams(self, pipes: tuple[int, int], command: m.Start, local_rank: int) -> None:
        worker = self._workers[local_rank]
        source = Source(worker.rank, command.node_rank, command.num_nodes > 1)
        for number, pipe in enumerate(pipes, start=1):
            self._add_stream(number, pipe, source, worker.logs, local_rank)

    def _release(self, local_rank: int) -> None:
        """Let a standby run the program as a rank."""
        standby, env, _ = self._taken.pop(local_rank)
        rank = self._workers[local_rank].rank
        try:
            standby.release(env, str(Path.cwd()), has_stdin=rank == self._options.stdin_rank)
        except OSError as err:
            self._say(f"rank {rank}: its standby cannot run the program: {err.strerror or err}")
            self._guard.signal(local_rank, signal.SIGKILL)

    def _replace_standby(self, local_rank: int) -> bool:
        """Start a new process for a rank whose standby has ended.

        Return whether the process was started.
        """
        standby, env, group = self._taken.pop(local_rank)
        standby.control.close()
        if self._grace.is_running or self._start is None:
            return False
        try:
            pipes = self._spawn(local_rank, env, group)
        except LaunchError:
            return False
        self._add_streams(pipes, self._start, local_rank)
        return True

    def stop(self, command: m.Stop) -> None:
        """Stop all workers: signal them, and kill them after the grace period.

        A snapshot in progress is completed first. An urgent command skips the snapshot's remaining
        waits. Once the workers of an attempt have been signaled, further calls have no effect.
        """
        self._give_up_start()
        if self._grace.is_running:
            return
        if self._examination is not None:
            self._stop_after_examination = command
            if command.urgent:
                self._examination.hurry()
            return
        self._hung = frozenset(command.hung)
        self._grace.begin(command.grace_ms / 1e3, time.monotonic(), has_hung=bool(self._hung))
        self._end_workers(command.number)
        # A stopped process handles SIGTERM only once it runs again.
        self._end_workers(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all workers that are still running."""
        self._give_up_start()
        self._stop_after_examination = None
        self._grace.note_killed(time.monotonic())
        self._end_workers(signal.SIGKILL)

    def kill_ranks(self, command: m.KillRanks) -> None:
        """Kill the given ranks and their process groups."""
        if command.attempt != self.attempt:
            return  # an earlier one
        self._kill_some(command.ranks)

    def _kill_some(self, ranks: Collection[int]) -> None:
        for worker in self._workers:
            if worker.rank in ranks and worker.exit_code is None:
                self._guard.signal(worker.local_rank, signal.SIGKILL)

    def _end_workers(self, number: int) -> None:
        """Send a signal to the running workers, and mark them as stopped by the launcher."""
        for worker in self._workers:
            if worker.exit_code is None:
                worker.stopped_by_agent = True
                self._guard.signal(worker.local_rank, number)

    def _check_grace(self) -> None:
        due = self._grace.due(time.monotonic())
        if due is Due.KILL:
            self.kill()
        elif due is Due.KILL_HUNG:  # the others then see its end, and end properly
            self._kill_some(self._hung)
        elif due in (Due.NAME, Due.GIVE_UP):
            assert self._start is not None
            for worker in self._workers:
                if worker.exit_code is not None:
                    continue
                why = why_it_lives(worker.pid)
                if due is Due.NAME:
                    self._say(
                        f"rank {worker.rank} (pid {worker.pid}) survives SIGKILL: {why}; waiting "
                        f"{UNKILLABLE_S:g} s for it"
                    )
                else:
                    event = m.Unkillable(attempt=self._start.attempt, rank=worker.rank, why=why)
                    self._tell(event)

    def pass_on(self, number: int) -> None:
        """Forward a signal from the user to all workers, but not to the workers' children."""
        for worker in self._workers:
            self._guard.signal(worker.local_rank, number, alone=True)

    @property
    def attempt(self) -> int:
        """The number of the attempt whose ranks this node runs; -1 before the first attempt."""
        return -1 if self._start is None else self._start.attempt

    @property
    def has_snapshot(self) -> bool:
        """True if `keep_snapshot` took a snapshot that no coordinator has collected yet."""
        return self._kept is not None

    def keep_snapshot(self) -> None:
        """Take a snapshot of this node's ranks for a new coordinator to collect later."""
        self._examination = self._stop_after_examination = None
        if self._kept is None and self.has_workers:
            self._kept = harvest(self._workers, self._occasion("failure"), self._pump)

    def report_again(self) -> None:
        """Report to a new coordinator which ranks have already ended."""
        ended = [worker for worker in self._workers if worker.exit_code is not None]
        for worker in sorted(ended, key=lambda worker: worker.exit_order):
            assert worker.exit_code is not None
            event = m.WorkerEnded(attempt=self.attempt, rank=worker.rank, code=worker.exit_code)
            self._tell(event)

    def collect(self, command: m.Collect) -> None:
        """Begin a snapshot of this node's ranks; send the dumps once the snapshot is complete."""
        self._finish_examining()
        occasion, start = self._occasion(command.kind), self._start
        gap_s = second_look_s(0.0 if start is None else start.stall_timeout_ms / 1e3)
        self._examination = Examination(command, self._workers, occasion, gap_s)
        self._examine_on()

    def _examine_on(self) -> None:
        """Continue the snapshot by one step; after the last step, send the dumps."""
        examination = self._examination
        assert examination is not None
        records = examination.step() if self._kept is None else self._kept
        if records is None:
            return
        self._examination = self._kept = None
        examination.send(records, self._tell)
        if self._sighting is not None:
            self._sighting.rest()
        self.look(at_once=True)  # whether a stall still lasts depends on what is seen now
        incident = examination.command.incident
        self._tell(m.Harvested(incident=incident, exit_codes=self._exit_codes()))
        if self._stop_after_examination is not None:
            stop, self._stop_after_examination = self._stop_after_examination, None
            self.stop(stop)

    def _finish_examining(self) -> None:
        """Complete the snapshot immediately, skipping any remaining waits."""
        while self._examination is not None:
            self._examination.hurry()
            self._examine_on()

    def collect_alone(self, reason: str) -> Path:
        """Write an incident that covers only this node.

        Raises:
            OSError: the incident cannot be written.
        """
        self._examination = None
        occasion = self._occasion("failure")
        if self._kept is None:
            self._kept = harvest(self._workers, occasion, self._pump)
        records, self._kept = self._kept, None
        return keep_alone(self._directory, self._workers, records, occasion, reason)

    def _occasion(self, kind: str) -> Occasion:
        assert self._start is not None
        return Occasion(
            kind=kind,
            attempt=self._start.attempt,
            world_size=self._start.world_size,
            job_id=self._start.job_id,
            oom_kills_before=self._oom_kills_before,
        )

    def clear_up(self) -> None:
        """End the processes that workers left behind, forward pending output, and send `Idle`."""
        self._finish_examining()
        deadline_s = time.monotonic() + _SWEEP_S
        denied = self._denied
        while self._swept != len(denied) and time.monotonic() < deadline_s:
            self._swept = None
            self._guard.sweep(signal.SIGKILL)
            while self._swept is None and time.monotonic() < deadline_s:
                self._pump(0.05)
        self._swept = None
        if denied:
            pids = ", ".join(map(str, sorted(set(denied))))
            self._say(f"not permitted to kill processes that workers left behind: pid {pids}")
            denied.clear()
        deadline_s = time.monotonic() + _DRAIN_S
        while self._streams and time.monotonic() < deadline_s:
            self._pump(0.05)
        for stream in list(self._streams.values()):
            stream.flush()
            self._drop(stream)
        self._terminal.end_live()
        laps = None if self._laps is None else self._laps.report()
        if laps is not None:
            self._tell(laps)
        self._close_rings()
        self._bring_rings_home()
        for worker in self._workers:
            if worker.torch is not None:
                worker.torch.clear_up()
        if self._start is not None:
            stopped = [worker.rank for worker in self._workers if worker.stopped_by_agent]
            stopped += self._not_started
            self._tell(
                m.Idle(attempt=self._start.attempt, exit_codes=self._exit_codes(), stopped=stopped)
            )

    def close(self) -> None:
        """Close all pipes, files and mappings."""
        self.probes.close()
        if self._hook is not None:
            self._hook.close()
        self._standbys.close()
        for standby, _, _ in self._taken.values():
            standby.control.close()
        for stream in list(self._streams.values()):
            self._drop(stream)
        self._close_rings()
        self._bring_rings_home()
        self._memory.close()
        self._containment.close()

    # ---- what is seen ----

    def look(self, *, at_once: bool = False) -> None:
        """Report the state of the live ranks, unless an incident is being collected."""
        laps = None if self._laps is None else self._laps.look()
        if laps is not None:
            self._tell(laps)
        if self._standings is not None:
            self._standings.look()
        if self._sighting is None or self._examination is not None:
            return
        sights = self._sighting.report(at_once=at_once)
        if sights is not None:
            self._tell(sights)
        self._keep_limits()

    def _keep_limits(self) -> None:
        """Write the limits learned for operations and spans to a file, for `echelon status`."""
        now_s = time.monotonic()
        if self._sighting is None or now_s < self._next_limits_s:
            return
        self._next_limits_s = now_s + _LIMITS_S
        self._limits_file.put(self._workers[0].folder, self._sighting.watched())

    def _num_printed(self, rank: int) -> int:
        return sum(s.num_bytes for s in self._streams.values() if s.source.rank == rank)

    def tell_status(self, visitor: str) -> None:
        """Send the state of this node's ranks to the coordinator, for a status client."""
        rows = [self._status(worker).pack() for worker in self._workers]
        self._tell(
            m.Statuses(
                visitor=visitor,
                host=socket.gethostname(),
                numbers=[numbers for numbers, _ in rows],
                words=[words for _, words in rows],
            )
        )

    def _status(self, worker: Worker) -> RankStatus:
        if worker.exit_code is not None:
            return silent(worker.rank, f"ended ({worker.exit_code})")
        try:
            return status_of(read_ring(worker.folder / "ring"), time.monotonic_ns())
        except DumpFormatError:
            return silent(worker.rank, "not recording")

    # ---- the guard's news, and output ----

    def _take_news(self) -> None:
        for news in self._guard.events():
            if not isinstance(news, Swept) and news.index >= FIRST_STANDBY:
                self._standbys.take_news(news)
            elif not isinstance(news, Swept) and news.index >= FIRST_INDEX:
                self._take_news_of_hook(news)
            elif isinstance(news, Started):
                self._workers[news.index].pid = news.pid
                if news.index in self._taken:
                    self._release(news.index)
            elif isinstance(news, Failed):
                if news.index in self._taken and self._replace_standby(news.index):
                    continue
                worker = self._workers[news.index]
                worker.start_error = news.error
                self._say(f"rank {worker.rank}: {news.error}")
                self._note_end(worker, _NOT_STARTED, time.monotonic_ns())
            elif isinstance(news, Exited):
                self._note_end(self._workers[news.index], news.code, news.mono_ns)
            elif isinstance(news, Swept):
                self._swept = news.count
                self._denied[:] = news.denied

    def _take_news_of_hook(self, news: Started | Failed | Exited) -> None:
        if self._hook is None or news.index != self._hook.index:
            return  # from a hook that was cancelled
        if isinstance(news, Failed):
            self._end_hook(None, news.error)
        elif isinstance(news, Exited):
            self._end_hook(news.code)

    def _note_end(self, worker: Worker, code: int, mono_ns: int) -> None:
        self._calm_since_s = time.monotonic()
        worker.exit_code = code
        worker.exited_mono_ns = mono_ns
        worker.exit_order = self._num_ended
        self._num_ended += 1
        assert self._start is not None
        if self._laps is not None:
            self._laps.read(worker)  # its last steps
        if self._standings is not None:
            self._standings.look()  # before the end that it explains
        self._tell(
            m.WorkerEnded(
                attempt=self._start.attempt, rank=worker.rank, code=code, error=worker.start_error
            )
        )

    def _add_stream(
        self, number: int, pipe: int, source: Source, folder: Path, local_rank: int
    ) -> None:
        plan, name = self._options.logs, "stdout" if number == 1 else "stderr"
        filters = plan.filters.get(number, ())
        filtered = folder.parent / f"filtered_{name}.log"
        stream = Stream(
            pipe,
            number,
            source,
            self._open(folder / f"{name}.log", "ab"),  # of a rank that was lost, it may be there
            self._terminal if plan.is_shown(local_rank, number) else None,
            tuple(text.encode() for text in filters),
            self._open(filtered, "ab") if filters else None,
            self._note_lost,
        )
        self._streams[pipe] = stream
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._pass_output(stream))

    def _open(self, path: Path, mode: str) -> BinaryIO | None:
        """Open an output file; on failure, report the error and return None."""
        try:
            return cast(BinaryIO, path.open(mode))
        except OSError as err:
            self._note_lost(err)
            return None

    def _note_lost(self, err: OSError) -> None:
        if not self._has_lost_output:
            self._has_lost_output = True
            why = err.strerror or err
            self._say(f"cannot write log files ({why}); output is shown but not saved")

    def _pass_output(self, stream: Stream) -> None:
        if stream.pipe in self._streams and not stream.pump():
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._selector.unregister(stream.pipe)
        del self._streams[stream.pipe]
        stream.close()

    # ---- helpers ----

    def _attempt(self, command: m.Start) -> environment.Attempt:
        ranks = range(command.first_rank, command.first_rank + command.num_workers)
        return environment.Attempt(
            number=self._directory.free_attempt(ranks, command.attempt),
            restart=command.restart,
            max_restarts=command.max_restarts,
            job_id=command.job_id,
            role=self._options.role,
            world_size=command.world_size,
            first_rank=command.first_rank,
            num_workers=command.num_workers,
            node_rank=command.node_rank,
            num_nodes=command.num_nodes,
            master_addr=command.master_addr,
            master_port=command.master_port,
            job_file=self._directory.job_file,
            recorder_size=self._options.recorder_size,
            terminal_columns=self._terminal.columns,
            virtual_local_rank=self._options.virtual_local_rank,
            torch_backend=command.torch_backend,
            resume=command.resume,
            on_loss=command.on_loss,
            join_after=command.join_after,
            lives=dict(zip(ranks, command.lives, strict=False)),
            lists_modules=self._options.standby > 0,
        )

    def _exit_codes(self) -> list[list[int]]:
        return [[w.rank, w.exit_code] for w in self._workers if w.exit_code is not None]

    def _bring_rings_home(self) -> None:
        for worker in self._workers:
            self._memory.bring_home(worker.folder)

    def _close_rings(self) -> None:
        self._laps = self._standings = None
        if self._sighting is not None:
            self._sighting.close()
            self._sighting = None


def _ranks(ranks: range) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}"
