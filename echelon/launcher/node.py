"""A node's part of a job: its workers, their output, their rings.

It obeys commands and tells events. It knows nothing of other nodes and decides nothing: what its
workers do goes to the coordinator, through `tell`, whether that lives in this process or elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from echelon.errors import DumpFormatError, LaunchError
from echelon.host.accelerators import visible_to
from echelon.host.process import oom_kills
from echelon.launcher import environment
from echelon.launcher.activity import Activity
from echelon.launcher.binding import bind, describe
from echelon.launcher.control import messages as m
from echelon.launcher.harvest import Occasion, Worker, harvest
from echelon.launcher.options import Options
from echelon.launcher.output import Source, Stream, Terminal
from echelon.launcher.ringmemory import RingMemory
from echelon.launcher.rundir import RunDirectory, write_json
from echelon.launcher.status import RankStatus, silent, status_of
from echelon.launcher.torch_dumps import TorchDump, torch_environment
from echelon.launcher.workers import Exited, Failed, Started, Swept, Workers
from echelon.recorder.dump import pack_dump, write_dump
from echelon.recorder.read import LiveRing, read_ring

_DRAIN_S = 1.0  # for what ended workers left in their pipes
_SWEEP_S = 2.0
_NOT_STARTED = 127


class NodeAgent:
    """The workers of this node, from one `Start` to the next."""

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
        self._rings: dict[int, LiveRing] = {}
        self._activities: dict[int, Activity] = {}  # of ranks without a ring
        self._workers: list[Worker] = []
        self._start: m.Start | None = None
        self._num_ended = 0
        self._swept: int | None = None
        self._oom_kills_before = oom_kills(os.getpid())
        self._processors = self._bind()
        self._memory = RingMemory.for_run(directory.path, options)
        if self._memory.folder is not None:
            guard.hold(str(self._memory.folder))

    def _bind(self) -> Sequence[frozenset[int] | None]:
        """Return the processors of each worker, None for all that the launcher has.

        Raises:
            LaunchError: there are too few, or too few GPUs.
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
        """The end of a sentence, "" if they lie in the run directory."""
        return str(self._memory)

    @property
    def has_workers(self) -> bool:
        """Whether some worker has not ended."""
        return any(worker.exit_code is None for worker in self._workers)

    def deadline_s(self) -> float:
        """When `tick` must be called, at the latest."""
        return self._terminal.deadline_s or float("inf")

    def tick(self) -> None:
        """Show output that was held back long enough."""
        self._terminal.tick()

    # ---- commands ----

    def start(self, command: m.Start) -> None:
        """Start this node's workers."""
        self._start = command
        self._num_ended = 0
        self._activities.clear()
        attempt = self._attempt(command)
        if command.num_nodes > 1:
            ranks = attempt.ranks
            here = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
            self._say(f"a world of {command.world_size} ranks begins; {here} on this node")
        self._workers = []
        for local_rank, rank in enumerate(attempt.ranks):
            folder = self._directory.make_rank_dir(rank, attempt.number)
            env = environment.worker_environment(os.environ, attempt, rank, folder)
            env.update(self._memory.environment())
            env.update(torch_environment(env, folder))
            self._workers.append(
                Worker(rank=rank, local_rank=local_rank, folder=folder, torch=TorchDump(env, rank))
            )
            pipes = self._guard.spawn(
                local_rank,
                self._options.program,
                env,
                str(Path.cwd()),
                self._processors[local_rank],
            )
            source = Source(rank, command.node_rank, command.num_nodes > 1)
            logs = self._options.logs.folder(folder, self._job_logs, attempt.number, local_rank)
            with contextlib.suppress(OSError):  # its files will say that they cannot be made
                logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._workers[-1].logs = logs
            for number, pipe in enumerate(pipes, start=1):
                self._add_stream(number, pipe, source, logs, local_rank)

    def signal(self, number: int) -> None:
        """End workers, or let them go on to their end: they count as stopped by us."""
        for worker in self._workers:
            if worker.exit_code is None:
                worker.stopped_by_agent = True
                self._guard.signal(worker.local_rank, number)

    def pass_on(self, number: int) -> None:
        """Pass a signal of the user's on to all workers."""
        for worker in self._workers:
            self._guard.signal(worker.local_rank, number)

    def collect(self, command: m.Collect) -> None:
        """Snapshot this node's ranks and send their dumps."""
        records = harvest(self._workers, self._occasion(command.kind), self._pump)
        for worker, record in zip(self._workers, records, strict=True):
            self._send_dump(command.incident, worker.rank, pack_dump(record), is_torchs=False)
            if worker.torch is not None:
                dump = worker.torch.read()
                self._send_dump(command.incident, worker.rank, dump, is_torchs=True)
        for rank, activity in self._activities.items():  # what we asked for is no sign of life
            activity.rest(self._num_printed(rank), time.monotonic_ns())
        self._tell(m.Harvested(incident=command.incident, exit_codes=self._exit_codes()))

    def _send_dump(self, incident: int, rank: int, data: bytes, *, is_torchs: bool) -> None:
        for start in range(0, len(data), m.DUMP_PART_BYTES):
            piece = data[start : start + m.DUMP_PART_BYTES]
            part = m.DumpPart(incident=incident, rank=rank, data=piece, is_torchs=is_torchs)
            self._tell(part)

    def collect_alone(self, reason: str) -> Path:
        """Keep an incident of this node's own, when nobody is there to send it to.

        Raises:
            OSError: it cannot be written.
        """
        number, folder = self._directory.open_incident()
        records = harvest(self._workers, self._occasion("failure"), self._pump)
        for worker, record in zip(self._workers, records, strict=True):
            write_dump(record, folder / f"rank_{worker.rank}")
            dump = b"" if worker.torch is None else worker.torch.read()
            if dump:
                (folder / f"torch_rank_{worker.rank}").write_bytes(dump)
        about = {"format": 1, "kind": "failure", "number": number, "reason": reason}
        start = self._start
        if start is not None:
            about |= {"attempt": start.attempt, "world_size": start.world_size}
        write_json(folder / "incident.json", about)
        return self._directory.complete_incident(number, folder)

    def clear_up(self) -> None:
        """End what workers left behind, pass on the rest of their output, and say so."""
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
        self._bring_rings_home()
        for worker in self._workers:
            if worker.torch is not None:
                worker.torch.clear_up()
        if self._start is not None:
            stopped = [worker.rank for worker in self._workers if worker.stopped_by_agent]
            self._tell(
                m.Idle(attempt=self._start.attempt, exit_codes=self._exit_codes(), stopped=stopped)
            )

    def close(self) -> None:
        """Close pipes, files and mappings."""
        for stream in list(self._streams.values()):
            self._drop(stream)
        self._close_rings()
        self._bring_rings_home()
        self._memory.close()

    # ---- what is seen ----

    def look(self) -> None:
        """Tell what the rings show."""
        start = self._start
        if start is None:
            return
        now = time.monotonic_ns()
        sights = [
            [worker.rank, *self._sight(worker, now), *_torch_sight(worker)]
            for worker in self._workers
            if worker.alive
        ]
        if sights:
            self._tell(m.Sights(attempt=start.attempt, ranks=sights))

    def _sight(self, worker: Worker, now: int) -> list[int]:
        ring = self._rings.get(worker.rank)
        if ring is None:
            try:
                ring = self._rings[worker.rank] = LiveRing(worker.folder / "ring")
            except DumpFormatError:
                return self._sight_from_outside(worker, now)
        sight = ring.sight(worker.rank)
        return [
            int(sight.initialised),
            _age_ms(now, sight.progress_mono_ns),
            _age_ms(now, sight.pending_mono_ns),
            sight.num_ended,
            1,
        ]

    def _sight_from_outside(self, worker: Worker, now: int) -> list[int]:
        """Look at a rank that has no ring: it has not opened one yet, or never will."""
        activity = self._activities.get(worker.rank)
        if activity is None:
            assert self._start is not None
            quiet_s = self._options.stall_timeout_s / 2
            activity = Activity(worker.pid, self._start.master_port, quiet_s, now)
            self._activities[worker.rank] = activity
        activity.look(self._num_printed(worker.rank), now)
        age_ms = _age_ms(now, activity.last_mono_ns)
        pending_ms = age_ms if activity.is_in_collective else -1
        return [int(activity.has_met), age_ms, pending_ms, activity.num_signs, 0]

    def _num_printed(self, rank: int) -> int:
        return sum(s.num_bytes for s in self._streams.values() if s.source.rank == rank)

    def tell_status(self, visitor: str) -> None:
        """Tell a visitor what this node's ranks do."""
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
            if isinstance(news, Started):
                self._workers[news.index].pid = news.pid
            elif isinstance(news, Failed):
                worker = self._workers[news.index]
                worker.start_error = news.error
                self._say(f"rank {worker.rank}: cannot run {news.error}")
                self._note_end(worker, _NOT_STARTED, time.monotonic_ns())
            elif isinstance(news, Exited):
                self._note_end(self._workers[news.index], news.code, news.mono_ns)
            elif isinstance(news, Swept):
                self._swept = news.count

    def _note_end(self, worker: Worker, code: int, mono_ns: int) -> None:
        worker.exit_code = code
        worker.exited_mono_ns = mono_ns
        worker.exit_order = self._num_ended
        self._num_ended += 1
        assert self._start is not None
        self._tell(m.WorkerEnded(attempt=self._start.attempt, rank=worker.rank, code=code))

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
            self._open(folder / f"{name}.log", "wb"),
            self._terminal if plan.is_shown(local_rank, number) else None,
            tuple(text.encode() for text in filters),
            self._open(filtered, "ab") if filters else None,
            self._note_lost,
        )
        self._streams[pipe] = stream
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._pass_output(stream))

    def _open(self, path: Path, mode: str) -> BinaryIO | None:
        """Open a file for output; None where that is impossible, which is said."""
        try:
            return cast(BinaryIO, path.open(mode))
        except OSError as err:
            self._note_lost(err)
            return None

    def _note_lost(self, err: OSError) -> None:
        if not self._has_lost_output:
            self._has_lost_output = True
            self._say(f"output is no longer kept in files ({err.strerror or err}); the job goes on")

    def _pass_output(self, stream: Stream) -> None:
        if stream.pipe in self._streams and not stream.pump():
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._selector.unregister(stream.pipe)
        del self._streams[stream.pipe]
        stream.close()

    # ---- small things ----

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
        )

    def _occasion(self, kind: str) -> Occasion:
        assert self._start is not None
        return Occasion(
            kind=kind,
            attempt=self._start.attempt,
            world_size=self._start.world_size,
            job_id=self._start.job_id,
            oom_kills_before=self._oom_kills_before,
        )

    def _exit_codes(self) -> list[list[int]]:
        return [[w.rank, w.exit_code] for w in self._workers if w.exit_code is not None]

    def _bring_rings_home(self) -> None:
        for worker in self._workers:
            self._memory.bring_home(worker.folder)

    def _close_rings(self) -> None:
        while self._rings:
            self._rings.popitem()[1].close()


def _torch_sight(worker: Worker) -> list[int]:
    if worker.torch is None:
        return [0]
    worker.torch.look()
    return [worker.torch.num_own]


def _age_ms(now_mono_ns: int, then_mono_ns: int) -> int:
    return max(0, now_mono_ns - then_mono_ns) // 1_000_000 if then_mono_ns else -1
