"""What N agents cost the coordinator: meeting, reporting, a stall, a loss, a failure, the end.

    python benchmarks/rendezvous.py [--agents 16,64,256,1024] [--ranks 8] [--steady 10]

The coordinator, its server and its decisions are the real ones; agents are simulated, in two
processes, and start no workers. They meet and report what their ranks show for `--steady` seconds.
Then, each time to the end of the restart that follows: a rank stalls and all send dumps; a node
leaves without a word; a rank fails. At last all ranks succeed. Prints a table: seconds to meet, the
processor time per agent, the share of a core in the steady state, the memory that grew meanwhile,
and the delay of each decision: of a stall, from the moment its limit is reached to the order to
collect; of a loss and a failure, from the event to the order to stop, less the pause for victims;
each time until it has been handed to the last node's connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SECRET = b"a-secret-of-the-benchmark"
NUM_PROCESSES = 2
STALL_S = 20.0  # `--stall-timeout`
_LIMIT_S = 400.0  # beside the steady state
_DUMP_BYTES = 24_000  # of one rank, as packed


def simulate(endpoint: str, first: int, count: int, ranks: int, gate: Any) -> None:
    """Run `count` agents that obey the coordinator, and do to it what the gate says."""
    import grpc.aio

    from echelon.launcher.control import messages as m
    from echelon.launcher.control.client import METHOD, OPTIONS
    from echelon.launcher.control.seal import Seal, new_nonce
    from echelon.launcher.control.session import Session
    from echelon.launcher.coordinator.decide import SETTLE_S

    dump = os.urandom(_DUMP_BYTES)

    class Agent:
        def __init__(self, number: int) -> None:
            self.channel = grpc.aio.insecure_channel(  # a connection of its own
                endpoint, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            )
            self.name = f"agent-{number}"
            self.state = Session()
            self.writing = asyncio.Lock()
            self.start: m.Start | None = None
            self.started = asyncio.Event()
            self.pending_since_s = 0.0  # 0: nothing waits
            self.moves = 0
            self.seen: set[str] = set()  # kinds of commands
            self.tasks: list[asyncio.Future[Any]] = []

        async def meet(self) -> None:
            deadline_s = time.monotonic() + 120
            while True:
                try:
                    await self.greet()
                    break
                except (grpc.RpcError, OSError):
                    if time.monotonic() > deadline_s:
                        raise
                    await asyncio.sleep(0.25)
            self.tasks = [asyncio.ensure_future(self.beats()), asyncio.ensure_future(self.obeys())]
            await self.started.wait()

        async def greet(self) -> None:
            self.call = self.channel.stream_stream(METHOD)()
            nonce = new_nonce()
            await self.call.write(nonce)
            self.seal = Seal(SECRET, nonce, await self.read(), is_host=False)
            hello = m.Hello(node=self.name, host=self.name, num_workers=ranks)
            await self.call.write(self.seal.close(m.pack(hello)))
            welcome = m.unpack(self.seal.open(await self.read()))
            assert isinstance(welcome, m.Welcome)
            self.beat_s = welcome.beat_ms / 1e3

        async def read(self) -> bytes:
            frame = await self.call.read()
            if not isinstance(frame, bytes):
                raise OSError("the stream ended")
            return frame

        async def obeys(self) -> None:
            while True:
                body = self.state.take(self.seal.open(await self.read()))
                if not self.state.is_idle or self.state.owes_acknowledgement:
                    await self.flush()
                command = m.unpack(body) if body is not None else None
                if command is None:
                    continue
                self.seen.add(type(command).__name__)
                if isinstance(command, m.Start):
                    self.start = command
                    self.started.set()
                elif isinstance(command, m.Collect):
                    await self.send_dumps(command)
                elif isinstance(command, m.Stop):
                    await self.end_ranks(-int(command.number))
                elif isinstance(command, m.ClearUp):
                    await self.say(m.Idle(attempt=command.attempt, exit_codes=[], stopped=[]))
                elif isinstance(command, m.Over):
                    return

        async def send_dumps(self, command: m.Collect) -> None:
            assert self.start is not None
            for rank in range(self.start.first_rank, self.start.first_rank + ranks):
                await self.say(m.DumpPart(incident=command.incident, rank=rank, data=dump))
            await self.say(m.Harvested(incident=command.incident, exit_codes=[]))

        async def end_ranks(self, code: int) -> None:
            start = self.start
            assert start is not None
            for rank in range(start.first_rank, start.first_rank + ranks):
                await self.say(m.WorkerEnded(attempt=start.attempt, rank=rank, code=code))

        async def beats(self) -> None:
            while True:
                every_s = self.beat_s
                if self.start is not None:
                    every_s = self.start.sights_ms / 1e3
                    await self.report()
                else:
                    async with self.writing:
                        await self.call.write(self.seal.close(self.state.beat()))
                await asyncio.sleep(every_s)

        async def report(self) -> None:
            assert self.start is not None
            pending_ms = -1
            if self.pending_since_s:
                pending_ms = int((time.monotonic() - self.pending_since_s) * 1000)
            else:
                self.moves += 100
            row = [self.start.first_rank, 1, 3, pending_ms, self.start.first_rank, self.moves, 0]
            await self.say(m.Sights(attempt=self.start.attempt, folded=row, ranks=[]))

        async def flush(self) -> None:
            async with self.writing:
                while (frame := self.state.frame()) is not None:
                    await self.call.write(self.seal.close(frame))
                if self.state.owes_acknowledgement:
                    await self.call.write(self.seal.close(self.state.beat()))

        async def say(self, event: Any) -> None:
            self.state.put(m.pack(event))
            await self.flush()

        async def hang_up(self) -> None:
            for task in self.tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                self.call.cancel()
            await self.channel.close()

    agents: list[Agent] = []

    async def seen_by_all(kind: str) -> None:
        """Wait until every agent has got a command."""
        deadline_s = time.monotonic() + 120
        while any(kind not in agent.seen for agent in agents):
            assert time.monotonic() < deadline_s, kind
            await asyncio.sleep(0.01)

    async def act(what: str) -> float:
        """Do one thing, if this process has the agent that does it; return when it was due."""
        for agent in agents:
            agent.seen.clear()
            agent.started.clear()
        is_first, last = first == 0, agents[-1]
        at_s = time.monotonic()
        if what == "stall":
            # What waits has waited for the limit in half a second from now.
            at_s += 0.5
            for agent in agents:
                agent.pending_since_s = at_s - STALL_S
                await agent.report()
            await seen_by_all("Collect")
            await asyncio.sleep(1.0)
            for agent in agents:
                agent.pending_since_s = 0.0
            return at_s
        if what == "lose" and not is_first:
            agents.remove(last)
            await last.hang_up()
        if what == "fail" and is_first:
            start = agents[0].start
            assert start is not None
            await agents[0].say(m.WorkerEnded(attempt=start.attempt, rank=start.first_rank, code=1))
        await seen_by_all("Stop")
        await seen_by_all("Start")
        return at_s + SETTLE_S

    async def live() -> None:
        agents.extend(Agent(first + index) for index in range(count))  # on this loop
        gate.send("ready")
        gate.recv()
        await asyncio.gather(*(agent.meet() for agent in agents))
        gate.send(time.monotonic())
        loop = asyncio.get_running_loop()
        while (what := await loop.run_in_executor(None, gate.recv)) != "end":
            gate.send(await act(what))  # this machine has one monotonic clock
        for agent in agents:
            await agent.end_ranks(0)
        await seen_by_all("Over")
        for agent in agents:
            await agent.hang_up()
        gate.send("ended")

    asyncio.run(live())


class Measured(NamedTuple):
    """What one run showed."""

    meet_s: float
    cpu_s: float  # of the coordinator's process, until all had met
    share: float  # of a core, in the steady state
    grown_mib: float  # while that lasted
    stall_s: float  # delays of decisions, see above
    loss_s: float
    failure_s: float


_ACTS = {"stall": 0, "lose": 1, "fail": 0}  # what happens, and in which process
_ORDERS = {"stall": "Collect", "lose": "Stop", "fail": "Stop"}  # what the coordinator then sends


def measure(num_agents: int, ranks: int = 8, steady_s: float = 0.0) -> Measured:
    """Let agents meet and report; with `steady_s`, let a stall, a loss and a failure follow."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    gates, processes = [], []
    share = num_agents // NUM_PROCESSES
    for index in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=simulate, args=(endpoint, index * share, share, ranks, theirs)
        )
        process.start()
        gates.append(ours)
        processes.append(process)
    for gate in gates:
        gate.recv()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(_Host(endpoint, num_agents, Path(folder), gates)) as host,
    ):
        cpu_s, start = _cpu_s(), time.monotonic()
        met_s = max(host.ask("go")) - start
        met_cpu_s = _cpu_s() - cpu_s
        delays = dict.fromkeys(_ACTS, 0.0)
        used = grown = 0.0
        if steady_s:
            host.serve_for(min(2.0, steady_s))  # the first reports come all at once
            cpu_s, start, before = _cpu_s(), time.monotonic(), _rss_mib()
            host.serve_for(steady_s)
            used = (_cpu_s() - cpu_s) / (time.monotonic() - start)
            grown = _rss_mib() - before
            for what, actor in _ACTS.items():
                host.sent.clear()
                due_s = host.ask(what)[actor]
                delays[what] = host.sent[_ORDERS[what]] - due_s
        host.ask("end")
        assert host.has_succeeded
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, process.exitcode
    return Measured(met_s, met_cpu_s, used, grown, *delays.values())


class _Host:
    """The coordinator with its server and its store, as the hosting node's agent runs them."""

    def __init__(self, endpoint: str, num_agents: int, folder: Path, gates: list[Any]) -> None:
        from echelon.launcher.control.conf import beat_s
        from echelon.launcher.control.link import Mailbox
        from echelon.launcher.control.server import ControlServer
        from echelon.launcher.coordinator.coordinator import Coordinator
        from echelon.launcher.coordinator.meeting import StoreProcess
        from echelon.launcher.job.report import Report
        from echelon.launcher.job.rundir import RunDirectory
        from echelon.launcher.options.options import parse
        from echelon.launcher.output.output import Terminal

        options = parse(
            [
                "--nnodes", f"{num_agents - 1}:{num_agents}", "--max-restarts", "9",
                "--stall-timeout", str(STALL_S), "--rdzv-conf", "last_call_timeout=120",
                "--rdzv-endpoint", endpoint, "--no-python", "true",
            ],
            {"ECHELON_SECRET": SECRET.decode()},
        )  # fmt: skip
        self._gates = gates
        self._events: Mailbox[Any] = Mailbox()
        interval_s = beat_s(num_agents, options.conf.lost_after_s)
        self._server = ControlServer(endpoint, SECRET, self._events, beat_s=interval_s)
        self._store = StoreProcess("127.0.0.1", "127.0.0.1", SECRET.decode())
        self.sent: dict[str, float] = {}  # kind of command -> when the last one left
        self._report = Report(job_id="x", world_size=0)
        self._coordinator = Coordinator(
            options, RunDirectory(folder, ""), self._report,
            self._store, self._send, _Silent(Terminal()),
        )  # fmt: skip

    @property
    def has_succeeded(self) -> bool:
        """Whether the job ended as it should."""
        return self._report.exit_code == 0

    def _send(self, node: str, command: Any) -> None:
        self.sent[type(command).__name__] = time.monotonic()
        self._server.send(node, command)

    def ask(self, what: str) -> list[Any]:
        """Tell both processes what to do, and serve until they have answered."""
        for gate in self._gates:
            gate.send(what)
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._gates):
            for gate in self._serve([gate for gate in self._gates if gate not in answers], 60.0):
                answers[gate] = gate.recv()
        return [answers[gate] for gate in self._gates]

    def serve_for(self, duration_s: float) -> None:
        """Serve for a while."""
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._serve([], left_s)

    def _serve(self, gates: list[Any], at_most_s: float) -> list[Any]:
        """Run the coordinator once, as its agent does; return the gates that have an answer."""
        coordinator, events = self._coordinator, self._events
        wait_s = max(0.0, min(at_most_s, coordinator.deadline_s() - time.monotonic()))
        ready, _, _ = select.select([events.fileno(), *gates], [], [], wait_s)
        for node, event in events.take():
            coordinator.take(node, event)
        coordinator.step()
        return [gate for gate in gates if gate in ready]

    def close(self) -> None:
        """End the server and the store."""
        self._coordinator.close()
        self._server.close()
        self._store.close()
        self._events.close()


class _Silent:
    """A terminal that prints nothing."""

    def __init__(self, terminal: Any) -> None:
        self.error_columns = terminal.error_columns

    def say(self, text: str) -> None:
        """Drop a line."""

    def write_error(self, text: str) -> None:
        """Drop lines."""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def in_fresh_process(num_agents: int, ranks: int = 8, steady_s: float = 0.0) -> Measured:
    """Measure in a process of its own: gRPC's event loop belongs to the first of a process."""
    code = f"from rendezvous import measure; print(*measure({num_agents}, {ranks}, {steady_s}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=_LIMIT_S + steady_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the simulated agents too
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(err)
    return Measured(*map(float, out.split()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", default="16,64,256,1024")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steady", type=float, default=10.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        "| agents | meet, s | us per agent | share of a core | grown, MiB | stall, s | loss, s "
        "| failure, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in [int(n) for n in args.agents.split(",")]:
        runs = [in_fresh_process(size, args.ranks, args.steady) for _ in range(args.repeats)]
        one = Measured(*(statistics.median(values) for values in zip(*runs, strict=True)))
        print(
            f"| {size} | {one.meet_s:.2f} | {one.cpu_s / size * 1e6:.0f} | {one.share:.1%} "
            f"| {one.grown_mib:.1f} | {one.stall_s:.2f} | {one.loss_s:.2f} | {one.failure_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
