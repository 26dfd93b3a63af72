"""Measure our store beside torch's: same machine, same run, same load generator.

    python benchmarks/store.py [--rounds N] [--only NAME] [--markdown FILE]

Both servers run in processes of their own and are measured in turn, round after round, so that
whatever else the machine does hits both; cases and servers are drawn in random order, and servers
and load are pinned to different cores. The table shows medians, their ratio (above 1: ours is
faster) and the ratio of the servers' processor time, which the load generator does not dilute. Raw
cases drive both servers with the same pre-encoded packets from several processes; client cases
compare our client on our server with torch's client on torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_load import (
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


@dataclass
class Case:
    """One line of the table.

    Attributes:
        name: what is measured.
        unit: of both figures.
        target: the ratio that issue and documentation ask for, None if none.
        higher_is_better: rates are, times are not.
        measure: (server name, server, round) to a figure, with the processor time if only a part of
            what was done counts.
    """

    name: str
    unit: str
    target: float | None
    higher_is_better: bool
    measure: Callable[[str, Server, int], float | Load]


def cases() -> list[Case]:
    """Return everything that is compared."""
    string = p.pack_string(b"/key/1")
    get, add = bytes((p.GET,)) + string, p.encode(p.ADD, b"/count", 1)
    return [
        Case("64 connections, get", "1/s", 1.0, True,
             lambda _, s, __: exchange(s, get, 13, 1)),
        Case("64 connections, add", "1/s", 1.0, True,
             lambda _, s, __: exchange(s, add, 8, 1)),
        Case("64 connections, 16 gets a packet", "1/s", 6.0, True,
             lambda _, s, __: exchange(s, get * 16, 13 * 16, 16)),
        Case("64 connections, sets without reply", "1/s", 0.6, True,
             lambda _, s, __: flood_of_sets(s)),
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


def pin(server: Server) -> None:
    """Put the server on the first core and this process, with the load that it forks, on the rest.

    Where the scheduler puts two processes that talk changes a round trip by a factor of 2 to 3.
    """
    if len(_CORES) > 1:
        for task in Path(f"/proc/{server.process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), _CORES[:1])
        os.sched_setaffinity(0, _CORES[1:])


_CORES = sorted(os.sched_getaffinity(0))


def compare(num_rounds: int, only: str) -> list[dict[str, Any]]:
    """Run all cases on both servers in turn; return the rows of the table."""
    samples: dict[str, dict[str, list[float]]] = {}
    latencies: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with ExitStack() as stack:
        servers = [start_server(name) for name in ("ours", "torch")]
        for server in servers:
            stack.callback(server.stop)
            pin(server)
            seed(server)
        for number in range(num_rounds):
            for case in random.sample(cases(), k=len(cases())):
                if only in case.name:
                    for server in random.sample(servers, k=len(servers)):
                        before = server.cpu_s()
                        load = case.measure(server.name, server, number)
                        if not isinstance(load, Load):
                            load = Load(load, server.cpu_s() - before)
                        of_case = samples.setdefault(case.name, {})
                        of_case.setdefault(server.name, []).append(load.rate)
                        of_case.setdefault(f"{server.name} cpu", []).append(load.cpu_s)
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
