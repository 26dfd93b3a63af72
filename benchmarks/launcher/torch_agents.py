"""Measure torchrun in two rows of `run.py`: the rendezvous of N agents, and its pickled key.

Agents are threads of two processes that run torch's own c10d rendezvous handler. Each has a store
client of its own, as with one agent per node. They start no workers.

    python -m benchmarks.launcher.torch_agents 64 [LIMIT_S]
"""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2
_RUN_ID = "bench"
_KEY = f"torch.rendezvous.{_RUN_ID}"


class MakeFolder:
    """An object that creates a folder when unpickled, which shows that its bytes were executed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.mkdir, (self._path,)  # type: ignore[return-value]


def hostile_bytes(path: Path) -> list[bytes]:
    """Return a list of hostile bytes: a pickle that creates the folder `path`, and garbage."""
    pickled = pickle.dumps(MakeFolder(path))
    return [base64.b64encode(pickled), pickled, b"\x80\x04garbage", bytes(range(256)) * 8]


def write_key(port: int, key: str, value: bytes) -> None:
    """Set a key, as any client of torch's store may."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3))
    store.set(key, value)


def simulate(port: int, count: int, total: int, limit_s: float, gate: Any) -> None:
    """Run `count` of `total` agents; send the time at which the last one joined, or None."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

    met: list[float] = []

    def agent() -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit_s))
        handler = dynamic.DynamicRendezvousHandler.from_backend(
            _RUN_ID, store, c10d.C10dRendezvousBackend(store, _RUN_ID), total, total,
            timeout=dynamic.RendezvousTimeout(join=timedelta(seconds=limit_s)),
        )  # fmt: skip
        handler.next_rendezvous()
        met.append(time.monotonic())

    threads = [threading.Thread(target=agent, daemon=True) for _ in range(count)]
    gate.send("ready")
    gate.recv()
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    gate.send(max(met) if len(met) == count else None)


def measure(num_agents: int, limit_s: float) -> float:
    """Return the seconds until all agents have met, or infinity at the limit."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    gates, processes = [], []
    for _ in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        share = num_agents // NUM_PROCESSES
        process = context.Process(
            target=simulate, args=(server.port, share, num_agents, limit_s, theirs)
        )
        process.start()
        gates.append(ours)
        processes.append(process)
    for gate in gates:
        gate.recv()
    start_s = time.monotonic()
    for gate in gates:
        gate.send("go")
    ends = [gate.recv() for gate in gates]
    for process in processes:
        process.kill()
        process.join()
    return float("inf") if None in ends else max(ends) - start_s


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0))
