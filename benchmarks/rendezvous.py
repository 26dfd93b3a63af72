"""How long N agents take to meet, and what they cost the coordinator afterwards.

    python benchmarks/rendezvous.py [--agents 16,64,256,1024] [--ranks 8] [--steady 10]

The coordinator, its server and its decisions are the real ones; agents are simulated, in two
processes, and start no workers. After their `Start` they report what their ranks show, twice a
second for `--steady` seconds; then a rank fails, and its node is told to stop. Prints a table:
seconds to meet, the processor time per agent, the share of a core in the steady state, the memory
that grew meanwhile, and the delay of the decision.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import select
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


def simulate(endpoint: str, first: int, count: int, ranks: int, steady_s: float, gate: Any) -> None:
    """Run `count` agents: greet, wait for `Start`, report for a while, fail once, end."""
    import grpc.aio

    from echelon.launcher.control.client import HEARTBEAT_S, METHOD, OPTIONS
    from echelon.launcher.control.messages import (
        Hello,
        Sights,
        Start,
        Stop,
        WorkerEnded,
        pack,
        unpack,
    )
    from echelon.launcher.control.seal import Seal, new_nonce
    from echelon.launcher.control.session import Session

    class Agent:
        def __init__(self, channel: grpc.aio.Channel, number: int) -> None:
            self.call = channel.stream_stream(METHOD)()
            self.name = f"agent-{number}"
            self.state = Session()
            self.start: Start | None = None
            self.stopped = asyncio.Event()

        async def meet(self) -> None:
            nonce = new_nonce()
            await self.call.write(nonce)
            self.seal = Seal(SECRET, nonce, await self.call.read(), is_host=False)
            hello = Hello(node=self.name, host=self.name, num_workers=ranks)
            await self.call.write(self.seal.close(pack(hello)))
            self.seal.open(await self.call.read())  # Welcome
            self.beat = asyncio.ensure_future(self.beats())
            while self.start is None:
                await self.receive()

        async def receive(self) -> None:
            body = self.state.take(self.seal.open(await self.call.read()))
            command = unpack(body) if body is not None else None
            if isinstance(command, Start):
                self.start = command
            elif isinstance(command, Stop):
                self.stopped.set()

        async def receives(self) -> None:
            while True:
                await self.receive()

        async def beats(self) -> None:
            moves = 0
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                if self.start is None:
                    await self.call.write(self.seal.close(self.state.beat()))
                    continue
                moves += 100
                folded = [self.start.first_rank, 1, 3, 2, self.start.first_rank, moves, 0]
                await self.say(Sights(attempt=self.start.attempt, folded=folded, ranks=[]))

        async def say(self, event: Any) -> None:
            self.state.put(pack(event))
            while (frame := self.state.frame()) is not None:
                await self.call.write(self.seal.close(frame))

    async def all_agents() -> None:
        channels = [
            grpc.aio.insecure_channel(
                endpoint, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            )
            for _ in range(count)
        ]
        gate.send("ready")
        gate.recv()
        agents = [Agent(channel, first + i) for i, channel in enumerate(channels)]
        await asyncio.gather(*(agent.meet() for agent in agents))
        gate.send(time.monotonic())
        if steady_s:
            readers = [asyncio.ensure_future(agent.receives()) for agent in agents]
            await asyncio.sleep(steady_s)
            started_s = time.monotonic()
            if first == 0:
                start = agents[0].start
                assert start is not None
                ended = WorkerEnded(attempt=start.attempt, rank=start.first_rank, code=1)
                await agents[0].say(ended)
            await asyncio.wait_for(agents[0].stopped.wait(), 120)
            gate.send(time.monotonic() - started_s)
            for reader in readers:
                reader.cancel()
        for agent in agents:
            agent.beat.cancel()
            await agent.call.done_writing()
        for channel in channels:
            await channel.close()

    asyncio.run(all_agents())


class Measured(NamedTuple):
    """What one run showed."""

    meet_s: float
    cpu_s: float  # of the coordinator's process, until all had met
    share: float  # of a core, in the steady state
    grown_mib: float  # while that lasted
    decision_s: float  # from a rank's end to the order to stop, the pause for victims included


def measure(num_agents: int, ranks: int = 8, steady_s: float = 0.0) -> Measured:
    """Let agents meet, report and fail once."""
    from echelon.launcher.control.link import Mailbox
    from echelon.launcher.control.server import ControlServer
    from echelon.launcher.coordinator.coordinator import Coordinator
    from echelon.launcher.coordinator.meeting import StoreProcess
    from echelon.launcher.job.report import Report
    from echelon.launcher.job.rundir import RunDirectory
    from echelon.launcher.options.options import parse
    from echelon.launcher.output.output import Terminal

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    gates, processes = [], []
    share = num_agents // NUM_PROCESSES
    for index in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        args = (endpoint, index * share, share, ranks, steady_s, theirs)
        process = context.Process(target=simulate, args=args)
        process.start()
        gates.append(ours)
        processes.append(process)
    for gate in gates:
        gate.recv()
    with tempfile.TemporaryDirectory() as folder:
        options = parse(
            ["--nnodes", str(num_agents), "--rdzv-endpoint", endpoint, "--no-python", "true"],
            {"ECHELON_SECRET": SECRET.decode()},
        )
        events: Mailbox[Any] = Mailbox()
        server = ControlServer(endpoint, SECRET, events)
        store = StoreProcess("127.0.0.1", "127.0.0.1", SECRET.decode())
        coordinator = Coordinator(
            options, RunDirectory(Path(folder), ""), Report(job_id="x", world_size=0),
            store, server.send, _Silent(Terminal()),
        )  # fmt: skip

        def serve(num_answers: int) -> list[float]:
            """Run the coordinator as its agent does, until so many gates have answered."""
            answers: list[float] = []
            while len(answers) < num_answers:
                wait_s = max(0.0, min(60.0, coordinator.deadline_s() - time.monotonic()))
                ready, _, _ = select.select([events.fileno(), *gates], [], [], wait_s)
                answers += [gate.recv() for gate in gates if gate in ready]
                for node, event in events.take():
                    coordinator.take(node, event)
                coordinator.step()
            return answers

        cpu_s, start = _cpu_s(), time.monotonic()
        for gate in gates:
            gate.send("go")
        met_s = max(serve(NUM_PROCESSES)) - start
        met_cpu_s = _cpu_s() - cpu_s
        steady = (0.0, 0.0, 0.0)
        if steady_s:
            cpu_s, start, before = _cpu_s(), time.monotonic(), _rss_mib()
            decision_s = max(serve(NUM_PROCESSES))
            used = (_cpu_s() - cpu_s) / (time.monotonic() - start)
            steady = (used, _rss_mib() - before, decision_s)
        coordinator.close()
        server.close()
        store.close()
        events.close()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, process.exitcode
    return Measured(met_s, met_cpu_s, *steady)


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
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        timeout=240 + steady_s,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Measured(*map(float, done.stdout.split()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", default="16,64,256,1024")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steady", type=float, default=10.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| agents | meet, s | us per agent | share of a core | grown, MiB | decision, s |")
    print("|---|---|---|---|---|---|")
    for size in [int(n) for n in args.agents.split(",")]:
        runs = [in_fresh_process(size, args.ranks, args.steady) for _ in range(args.repeats)]
        one = Measured(*(statistics.median(values) for values in zip(*runs, strict=True)))
        print(
            f"| {size} | {one.meet_s:.2f} | {one.cpu_s / size * 1e6:.0f} | {one.share:.1%} "
            f"| {one.grown_mib:.1f} | {one.decision_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
