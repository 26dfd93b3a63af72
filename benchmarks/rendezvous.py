"""How long N agents take to meet: from the first dial to the last `Start`.

    python benchmarks/rendezvous.py [--agents 16,64,256,1024]

The coordinator, its server and its decisions are the real ones; agents are simulated, in two
processes, and start no workers. Prints a table: seconds, and the coordinator's own processor time
an agent, which must stay flat.
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

SECRET = b"benchmark"
NUM_PROCESSES = 2
REPEATS = 3


def simulate(endpoint: str, first: int, count: int, gate: object) -> None:
    """Run `count` agents: greet, wait for `Start`, hang up."""
    import grpc.aio

    from echelon.launcher.control.client import HEARTBEAT_S, METHOD, OPTIONS
    from echelon.launcher.control.messages import Hello, Start, pack, unpack
    from echelon.launcher.control.seal import Seal, new_nonce

    async def agent(channel: grpc.aio.Channel, number: int) -> None:
        call = channel.stream_stream(METHOD)()
        nonce = new_nonce()
        await call.write(nonce)
        seal = Seal(SECRET, nonce, await call.read(), is_host=False)
        name = f"agent-{number}"
        await call.write(seal.close(pack(Hello(node=name, host=name, num_workers=8))))
        beat = asyncio.ensure_future(heartbeat(call, seal))
        while True:
            body = seal.open(await call.read())
            if body and isinstance(unpack(body), Start):
                break
        beat.cancel()
        await call.done_writing()

    async def heartbeat(call: grpc.aio.StreamStreamCall, seal: Seal) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await call.write(seal.close(b""))

    async def all_agents() -> None:
        channels = [
            grpc.aio.insecure_channel(
                endpoint, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            )
            for _ in range(count)
        ]
        gate.send("ready")  # type: ignore[attr-defined]
        gate.recv()  # type: ignore[attr-defined]
        await asyncio.gather(*(agent(c, first + i) for i, c in enumerate(channels)))
        gate.send(time.monotonic())  # type: ignore[attr-defined]
        for channel in channels:
            await channel.close()

    asyncio.run(all_agents())


def measure(num_agents: int) -> tuple[float, float]:
    """Return (seconds until everyone has its `Start`, coordinator's CPU seconds)."""
    from echelon.launcher.control.link import Mailbox
    from echelon.launcher.control.server import ControlServer
    from echelon.launcher.coordinator import Coordinator
    from echelon.launcher.meeting import StoreProcess
    from echelon.launcher.options import parse
    from echelon.launcher.report import Report
    from echelon.launcher.rundir import RunDirectory

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    gates, processes = [], []
    share = num_agents // NUM_PROCESSES
    for index in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        process = context.Process(target=simulate, args=(endpoint, index * share, share, theirs))
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
        events: Mailbox = Mailbox()
        server = ControlServer(endpoint, SECRET, events)
        store = StoreProcess("127.0.0.1", "127.0.0.1", SECRET.decode())
        coordinator = Coordinator(
            options, RunDirectory(Path(folder), ""), Report(job_id="x", world_size=0),
            store, server.send, lambda _: None,
        )  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.monotonic()
        for gate in gates:
            gate.send("go")
        left = list(gates)
        ends = []
        while left:
            ready, _, _ = select.select([events.fileno(), *left], [], [], 60)
            for gate in [g for g in left if g in ready]:
                ends.append(gate.recv())
                left.remove(gate)
            for node, event in events.take():
                if type(event).__name__ == "Hello":
                    coordinator.take(node, event)
            if coordinator._world is None:
                coordinator.step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        server.close()
        store.close()
        events.close()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0, process.exitcode
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return max(ends) - start, cpu


def in_fresh_process(num_agents: int) -> tuple[float, float]:
    """Measure in a process of its own: gRPC's event loop belongs to the first of a process."""
    code = f"from rendezvous import measure; print(*measure({num_agents}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent, timeout=120,
    )  # fmt: skip
    seconds, cpu = done.stdout.split()
    return float(seconds), float(cpu)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", default="16,64,256,1024")
    sizes = [int(n) for n in parser.parse_args().agents.split(",")]
    print("| agents | seconds | coordinator's CPU, us an agent |\n|---|---|---|")
    for size in sizes:
        runs = [in_fresh_process(size) for _ in range(REPEATS)]
        seconds = statistics.median(run[0] for run in runs)
        cpu = statistics.median(run[1] for run in runs)
        print(f"| {size} | {seconds:.2f} | {cpu / size * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
