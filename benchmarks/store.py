"""Measure our store beside torch's: same machine, same run, same load generator.

    python benchmarks/store.py [--rounds N] [--only NAME] [--markdown FILE]

Both servers run in processes of their own and are measured in turn, round after round, so that
whatever else the machine does hits both; the table shows medians and their ratio (above 1: ours is
faster). Raw cases drive both servers with the same pre-encoded packets from several processes;
client cases compare our client on our server with torch's client on torch's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of each name it cannot look up

from echelon.store import TCPStore
from echelon.store import protocol as p

_FORK = multiprocessing.get_context("fork")
_NUM_WORKERS = 2
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
        port: where it listens on loopback.
    """

    name: str
    process: subprocess.Popen[str]
    port: int

    def memory_mib(self) -> float:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Processor seconds used so far, by all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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


def in_workers(work: Callable[[int], Any], num_workers: int = _NUM_WORKERS) -> list[Any]:
    """Run `work(index)` in processes that start together; return their results."""
    gate = _FORK.Barrier(num_workers)
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


def exchange_rate(server: Server, packet: bytes, reply_bytes: int, num_commands: int) -> float:
    """Commands per second of 64 connections that each send the packet, wait, and send again."""
    num_connections, num_packets = 64, max(20, 24000 // num_commands // 64)

    def work(_: int) -> tuple[float, float]:
        sockets = [dial(server.port) for _ in range(num_connections // _NUM_WORKERS)]
        poller = select.epoll()
        state = {s.fileno(): [s, num_packets, 0] for s in sockets}
        began = time.perf_counter()
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
        ended = time.perf_counter()
        for connected in sockets:
            connected.close()
        return began, ended

    spans = in_workers(work)
    total = num_connections * num_packets * num_commands
    return total / (max(end for _, end in spans) - min(start for start, _ in spans))


def set_flood_rate(server: Server) -> float:
    """Sets per second, no replies, in packets of 64 on 64 connections."""
    num_connections, num_packets = 64, 100
    packet = b"".join(p.encode(p.SET, b"/key/%d" % i, b"value") for i in range(64))

    def work(_: int) -> tuple[float, float]:
        sockets = [dial(server.port) for _ in range(num_connections // _NUM_WORKERS)]
        began = time.perf_counter()
        for _ in range(num_packets):
            for connected in sockets:
                connected.sendall(packet)
        for connected in sockets:
            connected.sendall(p.encode(p.PING, 1))
        for connected in sockets:
            take(connected, 4)
        ended = time.perf_counter()
        for connected in sockets:
            connected.close()
        return began, ended

    spans = in_workers(work)
    total = num_connections * num_packets * 64
    return total / (max(end for _, end in spans) - min(start for start, _ in spans))


def join_s(server: Server, num_clients: int, label: int) -> float:
    """Seconds until clients have connected, counted themselves in, and all were released.

    Seven operations each: VALIDATE, PING, ADD, SET, WAIT, GET, CHECK; the last to be counted sets
    the key for which all wait.
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
    """Return our client or torch's."""
    if kind == "ours":
        return TCPStore("127.0.0.1", port, timeout=120.0)
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=120)
    return dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


def latencies_us(kind: str, server: Server) -> dict[str, tuple[float, float]]:
    """p50 and p99 of one client's calls, one after the other."""

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
    """Seconds until every rank has joined, has everyone's address, and is released.

    A process a rank, forked beforehand, all started by one pipe. Ours: connect, gather. torch's:
    connect, publish, read all (by multi_get, or `one_by_one` by a get for each address), count
    in, and pass the gate that opens when all have read: what its API offers for the same promise.
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
    """The same as `rendezvous_s`, from raw sockets: what the servers alone cost."""
    prefix = b"/raw/%d/" % label
    names = [prefix + b"%d" % rank for rank in range(num_ranks)]
    address = b"10.0.0.1:29500"

    def ours(ranks: range) -> None:
        sockets = [(rank, socket.create_connection(("127.0.0.1", server.port))) for rank in ranks]
        for _rank, connected in sockets:
            connected.sendall(_OUR_OPENING)
        for rank, connected in sockets:
            take(connected, 4)
            connected.sendall(p.encode(p.GATHER, prefix, rank, num_ranks, address))
        for _rank, connected in sockets:
            _status, length = p.unpack_frame_header(take(connected, p.FRAME_HEADER_BYTES))
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


# The table.


@dataclass
class Case:
    """One line of the table.

    Attributes:
        name: what is measured.
        unit: of both figures.
        target: the ratio that issue and documentation ask for, None if none.
        higher_is_better: rates are, times are not.
        measure: (server name, server, round) to a figure.
    """

    name: str
    unit: str
    target: float | None
    higher_is_better: bool
    measure: Callable[[str, Server, int], float]


def cases() -> list[Case]:
    """Return everything that is compared."""
    string = p.pack_string(b"/key/1")
    get, add = bytes((p.GET,)) + string, p.encode(p.ADD, b"/count", 1)
    return [
        Case("64 connections, get", "1/s", 1.0, True,
             lambda _, s, __: exchange_rate(s, get, 13, 1)),
        Case("64 connections, add", "1/s", 1.0, True,
             lambda _, s, __: exchange_rate(s, add, 8, 1)),
        Case("64 connections, 16 gets a packet", "1/s", 4.0, True,
             lambda _, s, __: exchange_rate(s, get * 16, 13 * 16, 16)),
        Case("64 connections, sets without reply", "1/s", 0.5, True,
             lambda _, s, __: set_flood_rate(s)),
        Case("join + release, 256 clients", "ms", 1.0, False,
             lambda _, s, n: 1000 * join_s(s, 256, n)),
        Case("join + release, 2000 clients", "ms", 1.0, False,
             lambda _, s, n: 1000 * join_s(s, 2000, 1000 + n)),
        Case("rendezvous of 256 ranks, raw sockets; torch: one multi_get", "ms", 5.0, False,
             lambda k, s, n: 1000 * raw_rendezvous_s(k, s, 256, n)),
        Case("rendezvous of 256 ranks, own client; torch: one multi_get", "ms", 5.0, False,
             lambda k, s, n: 1000 * rendezvous_s(k, s, 256, n)),
        Case("rendezvous of 256 ranks, own client; torch: a get for each", "ms", 5.0, False,
             lambda k, s, n: 1000 * rendezvous_s(k, s, 256, 100 + n, one_by_one=True)),
    ]  # fmt: skip


def seed(server: Server) -> None:
    """Store what the raw cases read."""
    connected = dial(server.port)
    connected.sendall(p.encode(p.SET, b"/key/1", b"value") + p.encode(p.PING, 1))
    take(connected, 4)
    connected.close()


def compare(num_rounds: int, only: str) -> list[dict[str, Any]]:
    """Run all cases on both servers in turn; return the rows of the table."""
    samples: dict[str, dict[str, list[float]]] = {}
    latencies: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with ExitStack() as stack:
        servers = [start_server(name) for name in ("ours", "torch")]
        for server in servers:
            stack.callback(server.stop)
            seed(server)
        for number in range(num_rounds):
            for case in cases():
                if only in case.name:
                    for server in servers:
                        before = server.cpu_s()
                        figure = case.measure(server.name, server, number)
                        of_case = samples.setdefault(case.name, {})
                        of_case.setdefault(server.name, []).append(figure)
                        of_case.setdefault(f"{server.name} cpu", []).append(server.cpu_s() - before)
            if only in "one client: latency":
                measure_latencies(servers, latencies)
            print(f"round {number + 1} of {num_rounds} done", file=sys.stderr)
    rows = [row_of(case, samples[case.name]) for case in cases() if case.name in samples]
    return latency_rows(latencies) + rows


def measure_latencies(
    servers: list[Server], latencies: dict[str, dict[str, list[tuple[float, float]]]]
) -> None:
    """Measure one client's calls: our client on ours, torch's client on both."""
    ours, torch = servers
    for label, kind, server in (
        ("ours", "ours", ours),
        ("torch", "torch", torch),
        ("torch's client on ours", "torch", ours),
    ):
        for name, pair in latencies_us(kind, server).items():
            latencies.setdefault(name, {}).setdefault(label, []).append(pair)


def row_of(case: Case, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return one line: medians and their ratio."""
    ours, torch = statistics.median(samples["ours"]), statistics.median(samples["torch"])
    ratio = ours / torch if case.higher_is_better else torch / ours
    return {
        "case": case.name,
        "unit": case.unit,
        "ours": ours,
        "torch": torch,
        "ratio": ratio,
        "target": case.target,
        "cpu_ratio": sum(samples["torch cpu"]) / max(0.01, sum(samples["ours cpu"])),
        "samples": samples,
    }


def latency_rows(
    latencies: dict[str, dict[str, list[tuple[float, float]]]],
) -> list[dict[str, Any]]:
    """Return the lines for one client's calls."""
    rows = []
    for name, by_label in latencies.items():
        middle = {
            label: [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
            for label, pairs in by_label.items()
        }
        for i, which in enumerate(("p50", "p99")):
            for label, what, target in (
                ("ours", "own client", 1.3 if name == "get" and i == 0 else None),
                ("torch's client on ours", "torch's client", 1.0 if i == 0 else None),
            ):
                ours, torch = middle[label][i], middle["torch"][i]
                rows.append(
                    {
                        "case": f"one client, {name} {which}, {what}",
                        "unit": "us",
                        "ours": ours,
                        "torch": torch,
                        "ratio": torch / ours,
                        "target": target,
                    }
                )
    return rows


# Cost of many connections, and per joining rank.


def connection_memory_mib(num_connections: int = 2000) -> float:
    """What that many idle client connections add to our server's resident memory."""
    server = start_server("ours")
    try:
        time.sleep(0.2)
        idle = server.memory_mib()
        sockets = [dial(server.port) for _ in range(num_connections)]
        cost = server.memory_mib() - idle
        for connected in sockets:
            connected.close()
        return cost
    finally:
        server.stop()


def cost_per_rank_us(num_ranks: int) -> float:
    """Processor time that our server spends on each rank of a rendezvous by gather."""
    server = start_server("ours")
    try:
        num_rounds = max(1, 4000 // num_ranks)
        before = server.cpu_s()
        for number in range(num_rounds):
            raw_rendezvous_s("ours", server, num_ranks, number)
        return (server.cpu_s() - before) / (num_rounds * num_ranks) * 1e6
    finally:
        server.stop()


def slow_reader_mib() -> float:
    """What 500 unread values of 1 MiB add to our server's resident memory, above the value."""
    server = start_server("ours")
    try:
        connected = dial(server.port)
        value = p.encode(p.SET, b"/big", bytes(1 << 20)) + p.encode(p.PING, 1)
        connected.sendall(value)
        take(connected, 4)
        before = server.memory_mib()
        connected.sendall(p.encode(p.GET, b"/big") * 500)
        peak = before
        for _ in range(20):
            time.sleep(0.05)
            peak = max(peak, server.memory_mib())
        connected.close()
        return peak - before
    finally:
        server.stop()


def absolute(only: str) -> list[tuple[str, float, str]]:
    """Return figures that stand alone, with what they should stay below."""
    found: list[tuple[str, float, str]] = []
    if only in "memory of connections":
        found.append(("2000 connections, MiB above idle", connection_memory_mib(), "<= 150"))
    if only in "slow reader":
        found.append(("500 x 1 MiB unread, MiB above idle", slow_reader_mib(), "<= 16"))
    if only in "cost per rank":
        for num_ranks in (16, 128, 512, 2000):
            cost = cost_per_rank_us(num_ranks)
            found.append((f"server time per rank, gather of {num_ranks}, us", cost, "flat"))
    return found


def show(rows: list[dict[str, Any]], figures: list[tuple[str, float, str]]) -> str:
    """Return everything as Markdown."""
    lines = [
        "| case | ours | torch | ratio | target | server's processor time, torch / ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        target = "" if row["target"] is None else f">= {row['target']:g}"
        cpu = f"{row['cpu_ratio']:.2f}" if "cpu_ratio" in row else ""
        missed = row["target"] is not None and row["ratio"] < row["target"]
        lines.append(
            f"| {row['case']} ({row['unit']}) | {row['ours']:,.1f} | {row['torch']:,.1f} "
            f"| {row['ratio']:.2f}{' (short)' if missed else ''} | {target} | {cpu} |"
        )
    if figures:
        lines += ["", "| our server alone | measured | target |", "|---|---:|---:|"]
        lines += [f"| {name} | {figure:,.1f} | {target} |" for name, figure, target in figures]
    return "\n".join(lines) + "\n"


def without_dns() -> None:
    """Start this program over in a mount namespace in which names come from files alone."""
    rules = Path(tempfile.gettempdir()) / f"echelon-nsswitch-{os.getpid()}"
    rules.write_text("hosts: files\n")
    script = 'mount --bind "$0" /etc/nsswitch.conf; rm "$0"; exec "$@" --dns on'
    os.execvp(
        "unshare", ["unshare", "-m", "sh", "-c", script, str(rules), sys.executable, *sys.argv]
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--dns",
        choices=("off", "on"),
        default="off",
        help="off (default, needs root): names are looked up in /etc/hosts alone, so that the "
        "reverse look-up that torch's server makes for each connection costs it nothing",
    )
    parser.add_argument("--json", type=Path, help="write all samples there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    args = parser.parse_args()
    if args.dns == "off" and os.geteuid() == 0:
        without_dns()
    rows, figures = compare(args.rounds, args.only), absolute(args.only)
    load = os.getloadavg()[0]
    text = show(rows, figures) + (
        f"\n{args.rounds} rounds, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        f"{platform.machine()}, Python {platform.python_version()}, load average {load:.1f}\n"
    )
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "figures": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
