"""Compare echelon's store with torch's: same machine, same run, same load generator.

    python -m benchmarks.store.run [--rounds N] [--only NAME] [--markdown FILE]

Both servers run in separate processes and are measured in turn, round by round, so that other work
on the machine affects both. Cases and servers run in random order, and servers and load are pinned
to different cores. The table shows medians, their ratio (above 1: echelon is faster) and the ratio
of the servers' CPU time, which does not include the load generator. Raw cases drive both servers
with the same pre-encoded packets from several processes; client cases compare echelon's client and
server with torch's client and server.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner.machine import CORES, Conditions, pin
from benchmarks.runner.options import finish, parser
from benchmarks.runner.rounds import Case, Samples, measure, middle, ratio
from benchmarks.store.load import (
    Load,
    Server,
    dial,
    exchange,
    flood_of_sets,
    join_s,
    latencies_us,
    raw_rendezvous_s,
    rendezvous_s,
    start_server,
    take,
)
from echelon.store.wire import protocol as p

COLUMNS = (
    ("case", "left"),
    ("echelon", "right"),
    ("torch", "right"),
    ("ratio", "right"),
    ("target", "right"),
    ("server's processor time, torch / echelon", "right"),
)
LATENCY = "one client: latency"


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: the measured quantity.
        unit: the unit of both figures.
        target: the required ratio, or None.
        higher_is_better: True for rates, False for times.
        measure: a function of (server name, server, round) that returns a figure, with its own CPU
            time if only part of the call counts.
    """

    name: str
    unit: str
    target: float | None
    higher_is_better: bool
    measure: Callable[[str, Server, int], float | Load]


def lines() -> list[Line]:
    """Return all lines of the comparison."""
    string = p.pack_string(b"/key/1")
    get, add = bytes((p.GET,)) + string, p.encode(p.ADD, b"/count", 1)
    return [
        Line("64 connections, get", "1/s", 1.0, True,
             lambda _, s, __: exchange(s, get, 13, 1)),
        Line("64 connections, add", "1/s", 1.0, True,
             lambda _, s, __: exchange(s, add, 8, 1)),
        Line("64 connections, 16 gets a packet", "1/s", 6.0, True,
             lambda _, s, __: exchange(s, get * 16, 13 * 16, 16)),
        Line("64 connections, sets without reply", "1/s", 0.6, True,
             lambda _, s, __: flood_of_sets(s)),
        Line("join + release, 256 clients", "ms", 1.0, False,
             lambda _, s, n: 1000 * join_s(s, 256, n)),
        Line("join + release, 2000 clients", "ms", 1.0, False,
             lambda _, s, n: 1000 * join_s(s, 2000, 1000 + n)),
        Line("rendezvous of 256 ranks, raw sockets; torch: one multi_get", "ms", 5.0, False,
             lambda k, s, n: 1000 * raw_rendezvous_s(k, s, 256, n)),
        Line("rendezvous of 256 ranks, own client; torch: one multi_get", "ms", 5.0, False,
             lambda k, s, n: 1000 * rendezvous_s(k, s, 256, n)),
        Line("rendezvous of 256 ranks, own client; torch: a get for each", "ms", 5.0, False,
             lambda k, s, n: 1000 * rendezvous_s(k, s, 256, 100 + n, one_by_one=True)),
    ]  # fmt: skip


def seed(server: Server) -> None:
    """Store the values that the raw cases read."""
    connected = dial(server.port)
    connected.sendall(p.encode(p.SET, b"/key/1", b"value") + p.encode(p.PING, 1))
    take(connected, 4)
    connected.close()


def compare(num_rounds: int, only: str, order: int | None) -> dict[str, Samples]:
    """Measure all lines on both servers in turn, with servers and load on separate cores."""
    with ExitStack() as stack:
        servers = [start_server(name) for name in ("ours", "torch")]
        for server in servers:
            stack.callback(server.stop)
            if len(CORES) > 1:
                pin(server.process.pid, CORES[:1])
                pin(0, CORES[1:])  # and with it the load that is forked here
            seed(server)
        cases = [as_case(line, servers) for line in lines()] + [latency_case(*servers)]
        return measure([one for one in cases if only in one.name], num_rounds, seed=order)


def as_case(line: Line, servers: list[Server]) -> Case:
    """Return the runner's case for a line."""

    def load(server: Server, number: int) -> dict[str, float]:
        before = server.cpu_s()
        found = line.measure(server.name, server, number)
        if not isinstance(found, Load):
            found = Load(found, server.cpu_s() - before)
        return {"": found.rate, "cpu": found.cpu_s}

    return Case(
        name=line.name,
        sides={server.name: functools.partial(load, server) for server in servers},
    )


def latency_case(ours: Server, torch: Server) -> Case:
    """Return the case of one client's calls: echelon's client, and torch's on both servers."""

    def calls(kind: str, server: Server, _: int) -> dict[str, float]:
        found = latencies_us(kind, server)
        return {
            f"{name} {which}": pair[place]
            for name, pair in found.items()
            for place, which in enumerate(("p50", "p99"))
        }

    return Case(
        name=LATENCY,
        sides={
            "own client": functools.partial(calls, "ours", ours),
            "torch's client": functools.partial(calls, "torch", ours),
            "torch": functools.partial(calls, "torch", torch),
        },
    )


def row_of(line: Line, samples: Samples) -> list[str]:
    """Return one line of the table: medians and their ratio."""
    ours, torch = samples["ours"], samples["torch"]
    better = ratio(ours, torch, higher_is_better=line.higher_is_better)
    cpu = sum(samples["torch cpu"]) / max(0.01, sum(samples["ours cpu"]))
    return cells(
        f"{line.name} ({line.unit})", middle(ours), middle(torch), better, line.target, cpu
    )


def latency_rows(samples: Samples) -> list[list[str]]:
    """Return the lines for one client's calls."""
    rows = []
    calls = [key.removeprefix("torch ") for key in samples if key.startswith("torch ")]
    for call in calls:
        torch = samples[f"torch {call}"]
        for client in ("own client", "torch's client"):
            ours = samples[f"{client} {call}"]
            target = {("own client", "get p50"): 1.3}.get((client, call))
            if client == "torch's client" and call.endswith("p50"):
                target = 1.0
            better = ratio(ours, torch, higher_is_better=False)
            name = f"one client, {call}, {client} (us)"
            rows.append(cells(name, middle(ours), middle(torch), better, target))
    return rows


def cells(
    name: str,
    ours: float,
    torch: float,
    better: float,
    target: float | None,
    cpu: float | None = None,
) -> list[str]:
    """Return a row's cells as text."""
    missed = target is not None and better < target
    return [
        name,
        f"{ours:,.1f}",
        f"{torch:,.1f}",
        f"{better:.2f}{' (short)' if missed else ''}",
        "" if target is None else f">= {target:g}",
        "" if cpu is None else f"{cpu:.2f}",
    ]


# Cost of many connections, and per joining rank.


def connection_memory_mib(num_connections: int = 2000) -> float:
    """Return how much idle connections add to the server's resident memory, in MiB."""
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
    """Return the server's CPU time per rank, in microseconds, in a rendezvous by gather."""
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
    """Return how much 500 unread replies of 1 MiB add to the server's memory, in MiB."""
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
    """Return the figures that have an upper limit instead of a comparison."""
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


def without_dns() -> None:
    """Restart this program in a mount namespace in which names are resolved from files only."""
    rules = Path(tempfile.gettempdir()) / f"echelon-nsswitch-{os.getpid()}"
    rules.write_text("hosts: files\n")
    script = 'mount --bind "$0" /etc/nsswitch.conf; rm "$0"; exec "$@" --dns on'
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", script, str(rules), *sys.orig_argv])


def main() -> int:
    """Measure and print the table."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument(
        "--dns",
        choices=("off", "on"),
        default="off",
        help="off (default, needs root): names are looked up in /etc/hosts alone, so that the "
        "reverse look-up that torch's server makes for each connection costs it nothing",
    )
    args = options.parse_args()
    if args.dns == "off" and os.geteuid() == 0:
        without_dns()
    conditions = Conditions(("torch", "uvloop"))
    samples = compare(args.rounds, args.only, args.seed)
    rows = latency_rows(samples[LATENCY]) if LATENCY in samples else []
    rows += [row_of(line, samples[line.name]) for line in lines() if line.name in samples]
    for name, figure, target in absolute(args.only):
        samples[name] = {"ours": [figure]}
        rows.append([f"our server alone: {name}", f"{figure:,.1f}", "", "", target, ""])
    finish(args, conditions, COLUMNS, rows, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
