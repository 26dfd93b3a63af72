"""The servers that `run.py` measures, and the load that drives them.

Servers run in separate processes. The load runs in a few processes that start together. Every
function drives one server once and returns one figure. Raw load consists of pre-encoded packets
over plain sockets; other load goes through echelon's or torch's client.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of each name it cannot look up

from echelon.store import TCPStore
from echelon.store.wire import protocol as p

_FORK = multiprocessing.get_context("fork")
_NUM_WORKERS = 2
_NUM_CONNECTIONS = 64
_TORCH_SERVER = """
import sys, torch.distributed as dist, datetime
store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=300), False)
print(store.port, flush=True)
sys.stdin.read()
"""
_OPENING = p.encode(p.VALIDATE, p.VALIDATE_MAGIC) + p.encode(p.PING, 1)
_OUR_OPENING = p.encode(p.VALIDATE, p.VALIDATE_MAGIC) + p.encode(p.PING, p.OUR_NONCE)


@dataclass
class Server:
    """A store server in a child process.

    Attributes:
        name: "ours" or "torch".
        port: the server's port on loopback.
    """

    name: str
    process: subprocess.Popen[str]
    port: int

    def memory_mib(self) -> float:
        """Return the resident memory of the process in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far by all its threads, as counted by the scheduler."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        """End the server by closing its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def start_server(name: str) -> Server:
    """Start one of the two servers on a free loopback port."""
    command = [sys.executable, "-c", _TORCH_SERVER]
    if name == "ours":
        command = [sys.executable, "-m", "echelon.store", "--port", "0"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    return Server(name, process, int(process.stdout.readline()))


@dataclass
class Load:
    """The result of a load.

    Attributes:
        rate: commands per second.
        cpu_s: the server's CPU time from the first packet on, which excludes connecting.
    """

    rate: float
    cpu_s: float


def in_workers(
    work: Callable[[int], Any], num_workers: int = _NUM_WORKERS, gate: Any = None
) -> list[Any]:
    """Run `work(index)` in processes that start together; return their results."""
    gate = gate or _FORK.Barrier(num_workers)
    results: Any = _FORK.SimpleQueue()

    def run(index: int) -> None:
        gate.wait()
        results.put(work(index))

    workers = [_FORK.Process(target=run, args=(index,)) for index in range(num_workers)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
        if worker.exitcode != 0:
            raise RuntimeError(f"load process ended with {worker.exitcode}")
    return found


def dial(port: int) -> socket.socket:
    """Return a socket that has passed torch's handshake."""
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.sendall(_OPENING)
    take(connected, 4)
    return connected


def take(connected: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes."""
    data = b""
    while len(data) < size:
        piece = connected.recv(size - len(data))
        if not piece:
            raise ConnectionError("the server left")
        data += piece
    return data


# Raw load.


def exchange(server: Server, packet: bytes, reply_bytes: int, num_commands: int) -> Load:
    """Make each of 64 connections repeatedly send the packet and wait for the reply."""

    num_packets = 375 if num_commands == 1 else 100

    def act(sockets: list[socket.socket]) -> None:
        poller = select.epoll()
        state = {s.fileno(): [s, num_packets, 0] for s in sockets}
        for connected in sockets:
            poller.register(connected, select.EPOLLIN)
            connected.sendall(packet)
        while state:
            for descriptor, _event in poller.poll():
                entry = state[descriptor]
                entry[2] += len(entry[0].recv(1 << 20))
                if entry[2] < reply_bytes:
                    continue
                entry[1:] = [entry[1] - 1, 0]
                if entry[1]:
                    entry[0].sendall(packet)
                else:
                    poller.unregister(descriptor)
                    del state[descriptor]

    return drive(server, act, _NUM_CONNECTIONS * num_packets * num_commands)


def flood_of_sets(server: Server) -> Load:
    """Send SET commands, which have no replies, in packets of 64 on 64 connections."""
    num_packets = 100
    packet = b"".join(p.encode(p.SET, b"/key/%d" % i, b"value") for i in range(64))

    def act(sockets: list[socket.socket]) -> None:
        for _ in range(num_packets):
            for connected in sockets:
                connected.sendall(packet)
        for connected in sockets:
            connected.sendall(p.encode(p.PING, 1))
        for connected in sockets:
            take(connected, 4)

    return drive(server, act, _NUM_CONNECTIONS * num_packets * 64)


def drive(server: Server, act: Callable[[list[socket.socket]], None], num_commands: int) -> Load:
    """Run `act` in worker processes, each on its subset of the connections, once all are open."""
    gate = _FORK.Barrier(_NUM_WORKERS)

    def work(_: int) -> tuple[float, float, float, float]:
        sockets = [dial(server.port) for _ in range(_NUM_CONNECTIONS // _NUM_WORKERS)]
        gate.wait()
        cpu_s, began = server.cpu_s(), time.perf_counter()
        gate.wait()
        act(sockets)
        gate.wait()
        ended, cpu_end_s = time.perf_counter(), server.cpu_s()
        gate.wait()
        for connected in sockets:
            connected.close()
        return began, ended, cpu_s, cpu_end_s

    spans = in_workers(work, gate=gate)
    began, ended = min(span[0] for span in spans), max(span[1] for span in spans)
    cpu_s = max(span[3] for span in spans) - min(span[2] for span in spans)
    return Load(num_commands / (ended - began), cpu_s)


def join_s(server: Server, num_clients: int, label: int) -> float:
    """Return the seconds until all clients have connected, registered, and been released.

    Each client performs seven operations: VALIDATE, PING, ADD, SET, WAIT, GET, CHECK. The last one
    to be counted sets the key for which all wait.
    """
    count, gate = b"/join/%d/count" % label, b"/join/%d/gate" % label

    def work(index: int) -> tuple[float, float]:
        began = time.perf_counter()
        sockets = []
        for number in range(num_clients // _NUM_WORKERS):
            connected = socket.create_connection(("127.0.0.1", server.port))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.sendall(_OPENING + p.encode(p.ADD, count, 1))
            sockets.append((connected, b"/join/%d/%d/%d" % (label, index, number)))
        for connected, mine in sockets:
            total = p.unpack_i64(take(connected, 12)[4:])
            request = p.encode(p.SET, mine, b"10.0.0.1:1234")
            if total == num_clients // _NUM_WORKERS * _NUM_WORKERS:
                request += p.encode(p.SET, gate, b"go")
            connected.sendall(request + p.encode(p.WAIT, [gate]))
        for connected, mine in sockets:
            take(connected, 1)
            connected.sendall(p.encode(p.GET, gate) + p.encode(p.CHECK, [mine]))
        for connected, _mine in sockets:
            take(connected, 11)
        ended = time.perf_counter()
        for connected, _mine in sockets:
            connected.close()
        return began, ended

    spans = in_workers(work)
    return max(end for _, end in spans) - min(start for start, _ in spans)


# Clients.


def open_client(kind: str, port: int) -> Any:
    """Return echelon's client or torch's."""
    if kind == "ours":
        return TCPStore("127.0.0.1", port, timeout=120.0)
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=120)
    return dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


def latencies_us(kind: str, server: Server) -> dict[str, tuple[float, float]]:
    """Return p50 and p99 of one client's sequential calls in microseconds, by call."""

    def work(_: int) -> dict[str, tuple[float, float]]:
        store = open_client(kind, server.port)
        store.set("latency/key", b"value")
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: store.get("latency/key"),
            "set": lambda: store.set("latency/key", b"value"),
            "add": lambda: store.add("latency/count", 1),
            "wait": lambda: store.wait(["latency/key"]),
        }
        found = {}
        for name, call in calls.items():
            for _ in range(300):
                call()
            samples = []
            for _ in range(3000):
                began = time.perf_counter_ns()
                call()
                samples.append(time.perf_counter_ns() - began)
            store.check(["latency/key"])
            samples.sort()
            found[name] = (samples[1500] / 1000, samples[2970] / 1000)
        return found

    return dict(in_workers(work, 1)[0])


def rendezvous_s(
    kind: str, server: Server, num_ranks: int, label: int, *, one_by_one: bool = False
) -> float:
    """Return the seconds until every rank has joined, has all addresses, and is released.

    There is one process per rank, forked beforehand; all are started through one pipe. With
    echelon's client, a rank connects and gathers. With torch's client, a rank connects, publishes
    its address, reads all addresses (with one multi_get or, with `one_by_one`, one get per
    address), increments a counter, and waits for the key that is set once all have read. This is
    how torch's API provides the same guarantee.
    """

    def ours(rank: int) -> int:
        store = open_client("ours", server.port)
        return len(store.gather(f"rdzv/{label}", rank, num_ranks, f"10.0.0.{rank}:29500"))

    def theirs(rank: int) -> int:
        store = open_client("torch", server.port)
        prefix = f"rdzv/{label}"
        store.set(f"{prefix}/{rank}", f"10.0.0.{rank}:29500")
        names = [f"{prefix}/{r}" for r in range(num_ranks)]
        values = [store.get(name) for name in names] if one_by_one else store.multi_get(names)
        if store.add(f"{prefix}/read", 1) == num_ranks:
            store.set(f"{prefix}/gate", "open")
        store.wait([f"{prefix}/gate"])
        return len(values)

    def zygote(_: int) -> float:
        if kind == "torch":
            import torch.distributed  # noqa: F401 - not part of the rendezvous
        act = ours if kind == "ours" else theirs
        gate, start = os.pipe()
        ended, report = os.pipe()
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                os.close(start)
                os.read(gate, 1)
                num_values = act(rank)
                os.write(report, b"%24.9f\n" % time.perf_counter())
                os._exit(0 if num_values == num_ranks else 1)
            children.append(child)
        os.close(report)
        time.sleep(0.2)  # lets the children reach the gate
        began = time.perf_counter()
        os.close(start)
        with os.fdopen(ended, "rb") as stream:
            last = max(map(float, stream))
        if any(os.waitpid(child, 0)[1] for child in children):
            raise RuntimeError("a rank failed")
        return last - began

    return float(in_workers(zygote, 1)[0])


def raw_rendezvous_s(kind: str, server: Server, num_ranks: int, label: int) -> float:
    """Do the same as `rendezvous_s` over raw sockets, to measure the servers alone."""
    prefix = b"/raw/%d/" % label
    names = [prefix + b"%d" % rank for rank in range(num_ranks)]
    address = b"10.0.0.1:29500"

    def ours(ranks: range) -> None:
        sockets = [(rank, socket.create_connection(("127.0.0.1", server.port))) for rank in ranks]
        for _rank, connected in sockets:
            connected.sendall(_OUR_OPENING)
        for rank, connected in sockets:
            take(connected, 4)
            connected.sendall(p.tagged(p.GATHER, 1, prefix, rank, num_ranks, address))
        for _rank, connected in sockets:
            _status, _tag, length = p.unpack_frame_header(take(connected, p.FRAME_HEADER_BYTES))
            take(connected, length)
            connected.close()

    def theirs(ranks: range) -> None:
        sockets = [(rank, socket.create_connection(("127.0.0.1", server.port))) for rank in ranks]
        wait, read = p.encode(p.WAIT, names), p.encode(p.MULTI_GET, names)
        for _rank, connected in sockets:
            connected.sendall(_OPENING)
        for rank, connected in sockets:
            take(connected, 4)
            connected.sendall(p.encode(p.SET, names[rank], address) + wait)
        for _rank, connected in sockets:
            take(connected, 1)
            connected.sendall(read)
        for _rank, connected in sockets:
            take(connected, num_ranks * (8 + len(address)))
            connected.sendall(p.encode(p.ADD, prefix + b"read", 1))
        for _rank, connected in sockets:
            opens = p.unpack_i64(take(connected, 8)) == num_ranks
            gate = p.encode(p.SET, prefix + b"gate", b"open") if opens else b""
            connected.sendall(gate + p.encode(p.WAIT, [prefix + b"gate"]))
        for _rank, connected in sockets:
            take(connected, 1)
            connected.close()

    def work(index: int) -> tuple[float, float]:
        per_worker = num_ranks // _NUM_WORKERS
        began = time.perf_counter()
        ranks = range(index * per_worker, (index + 1) * per_worker)
        (ours if kind == "ours" else theirs)(ranks)
        return began, time.perf_counter()

    spans = in_workers(work)
    return max(end for _, end in spans) - min(start for start, _ in spans)
