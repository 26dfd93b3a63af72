"""Several hosts on one machine: network namespaces on a bridge, made and removed by the test.

Needs root and iproute2. Every namespace's name carries the test process's pid; removing it takes
its processes' network along, not the processes: the test ends those itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import wire
from tests.support.programs import run_programs
from tests.support.wire import Wire

_ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=60)


def _may_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ech{os.getpid()}probe"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.SubprocessError):
        return False
    try:
        _ip("-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except subprocess.SubprocessError:
        return False
    finally:
        _ip("netns", "delete", name)
    return True


needs_hosts = pytest.mark.skipif(
    not _may_make_hosts(), reason="needs root and iproute2 for network namespaces"
)


needs_wire = pytest.mark.skipif(bool(wire.may_be_made()), reason=wire.may_be_made())
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft, to lose packets")


class Host:
    """One namespace with an address of its own."""

    def __init__(self, network: str, name: str, address: str) -> None:
        self._network = network
        self.name = name
        self.address = address
        self.wire: Wire | None = None

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.name, *argv]

    def command_to_cut(self) -> list[str]:
        """Return the command line that takes the link down: packets vanish, no rank is notified."""
        return ["ip", "-n", self._network, "link", "set", f"to-{self.name[-6:]}", "down"]

    def cut(self) -> None:
        """Take the link down."""
        subprocess.run(self.command_to_cut(), check=True, capture_output=True, timeout=60)

    def swallow(self, *, but_port: int) -> None:
        """Let everything this host sends vanish, but TCP from and to one port."""
        for number, rule in enumerate(
            (
                f"ipproto tcp dport {but_port} lookup main",
                f"ipproto tcp sport {but_port} lookup main",
            )
        ):
            _ip("-n", self.name, "rule", "add", "priority", str(10 + number), *rule.split())
        _ip("-n", self.name, "rule", "add", "priority", "20", "to", "10.77.0.0/16", "blackhole")

    def lose_way_to(self, other: Host) -> None:
        """Let all that this host sends to another one vanish; nobody is told."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{other.address}/32")

    def heal(self) -> None:
        """Bring the link up again."""
        _ip("-n", self._network, "link", "set", f"to-{self.name[-6:]}", "up")

    def lose(self, percent: int) -> None:
        """Drop so many of a hundred packets that come here, at random. Needs nft."""
        rules = (
            "add table inet lossy",
            "add chain inet lossy input { type filter hook input priority 0; }",
            f"add rule inet lossy input iif eth0 numgen random mod 100 < {percent} counter drop",
        )
        subprocess.run(
            self.command("nft", "; ".join(rules)), check=True, capture_output=True, timeout=60
        )

    def num_dropped(self) -> int:
        """Return how many packets were dropped since `lose`."""
        listed = subprocess.run(
            self.command("nft", "list", "table", "inet", "lossy"),
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return int(listed.stdout.partition("counter packets ")[2].split()[0])

    def sockets(self) -> list[str]:
        """Return this host's sockets that some process still has (the kernel keeps others)."""
        script = "cat /proc/net/tcp /proc/net/tcp6; tail -n +2 /proc/net/unix"
        listed = subprocess.run(
            self.command("sh", "-c", script),
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        rows = [line.split() for line in listed.stdout.splitlines()]
        return [
            " ".join(row) for row in rows if row[0] != "sl" and (len(row) < 10 or row[9] != "0")
        ]


@contextlib.contextmanager
def hosts(count: int, *, wired: Collection[int] = ()) -> Iterator[list[Host]]:
    """Make `count` hosts on one network, 10.77.x.1 and so on, and remove them at the end.

    Those in `wired` hang on a `wire` that the test can slow down.
    """
    number = next(_numbers)
    network = f"ech{os.getpid()}net{number}"
    made = []
    wires: list[Wire] = []
    try:
        _ip("netns", "add", network)
        made.append(network)
        _ip("-n", network, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", network, "link", "set", "bridge0", "up")
        result = []
        for index in range(count):
            host = Host(
                network, f"ech{os.getpid()}h{number:02d}{index:03d}", f"10.77.{number}.{index + 1}"
            )
            port = f"to-{host.name[-6:]}"
            _ip("netns", "add", host.name)
            made.append(host.name)
            if index in wired:
                host.wire = Wire((host.name, "eth0"), (network, port))
                wires.append(host.wire)
            else:
                _ip("-n", network, "link", "add", port, "type", "veth", "peer", "name", "eth0",
                    "netns", host.name)  # fmt: skip
            _ip("-n", network, "link", "set", port, "master", "bridge0")
            _ip("-n", network, "link", "set", port, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", link, "up")
            result.append(host)
        yield result
    finally:
        for one in wires:
            one.close()
        for name in reversed(made):
            _ip("netns", "delete", name)


def run_on(
    machines: Sequence[Host], *argv: str, ranks_per_host: int = 2, timeout_s: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run one command on every host, `ranks_per_host` times, as the ranks of one world.

    They meet on the first host, and nothing of them runs on when this returns. A rank may end in
    any way: its exit code is the caller's to assert. `run_text_on` starts a Python program sooner.

    Returns:
        By rank: how it ended, and what it wrote.

    Raises:
        subprocess.TimeoutExpired: a rank ran on.
    """
    placed = [(host, place) for host in machines for place in range(ranks_per_host)]
    env = {**os.environ, **_world(machines, ranks_per_host)}
    ranks = [
        subprocess.Popen(
            host.command(*argv),
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(place)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, (host, place) in enumerate(placed)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            with rank:  # closes its pipes, and waits
                rank.kill()
    return [
        subprocess.CompletedProcess(argv, rank.returncode, *said)
        for rank, said in zip(ranks, texts, strict=True)
    ]


def run_text_on(
    machines: Sequence[Host],
    text: str,
    *args: str,
    ranks_per_host: int = 2,
    timeout_s: float = 120.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the text of a Python program on every host, as `run_on` does `python -c`.

    Its processes have torch loaded: four start in less than a second.
    """
    return run_programs(
        [host.name for host in machines for _ in range(ranks_per_host)],
        text,
        *args,
        environ=_world(machines, ranks_per_host),
        timeout_s=timeout_s,
    )


def _world(machines: Sequence[Host], ranks_per_host: int) -> dict[str, str]:
    """Return the variables that all ranks have in common; the first rank's process is the store."""
    return {
        "WORLD_SIZE": str(len(machines) * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": "29400",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
    }
