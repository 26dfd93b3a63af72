"""Emulate several hosts on one machine by network namespaces that are connected by a bridge.

Needs root and iproute2. The test creates and removes the namespaces, whose names contain the test
process's PID. Removing a namespace disconnects its processes but does not end them; the test must
end them itself.
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
    """An emulated host: a network namespace with its own address."""

    def __init__(self, network: str, name: str, address: str) -> None:
        self._network = network
        self.name = name
        self.address = address
        self.wire: Wire | None = None

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.name, *argv]

    def command_to_cut(self) -> list[str]:
        """Return a command line that takes the link down: packets are dropped without an error."""
        return ["ip", "-n", self._network, "link", "set", f"to-{self.name[-6:]}", "down"]

    def cut(self) -> None:
        """Take the host's link down."""
        subprocess.run(self.command_to_cut(), check=True, capture_output=True, timeout=60)

    def swallow(self, *, but_port: int) -> None:
        """Drop all packets that this host sends, except TCP packets from or to `but_port`."""
        for number, rule in enumerate(
            (
                f"ipproto tcp dport {but_port} lookup main",
                f"ipproto tcp sport {but_port} lookup main",
            )
        ):
            _ip("-n", self.name, "rule", "add", "priority", str(10 + number), *rule.split())
        _ip("-n", self.name, "rule", "add", "priority", "20", "to", "10.77.0.0/16", "blackhole")

    def lose_way_to(self, other: Host) -> None:
        """Drop all packets that this host sends to `other`, without an error."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{other.address}/32")

    def heal(self) -> None:
        """Bring the host's link up again."""
        _ip("-n", self._network, "link", "set", f"to-{self.name[-6:]}", "up")

    def lose(self, percent: int) -> None:
        """Drop `percent` percent of this host's incoming packets at random. Needs nft."""
        rules = (
            "add table inet lossy",
            "add chain inet lossy input { type filter hook input priority 0; }",
            f"add rule inet lossy input iif eth0 numgen random mod 100 < {percent} counter drop",
        )
        subprocess.run(
            self.command("nft", "; ".join(rules)), check=True, capture_output=True, timeout=60
        )

    def num_dropped(self) -> int:
        """Return the number of packets dropped since `lose` was called."""
        listed = subprocess.run(
            self.command("nft", "list", "table", "inet", "lossy"),
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return int(listed.stdout.partition("counter packets ")[2].split()[0])

    def sockets(self) -> list[str]:
        """Return this host's sockets that are held by a process rather than only by the kernel."""
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
    """Create `count` hosts on one network (10.77.x.1, 10.77.x.2, ...), and remove them on exit.

    The hosts with an index in `wired` are connected by a `Wire`, which the test can slow down.
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
    """Run one command `ranks_per_host` times on every host, as the ranks of one world.

    The rendezvous is on the first host. All ranks have exited when this function returns. A failed
    rank does not raise an error; the caller must check the exit codes. `run_text_on` starts Python
    programs faster.

    Returns:
        The exit code and the output of each rank, in rank order.

    Raises:
        subprocess.TimeoutExpired: a rank did not exit within `timeout_s`.
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
    """Run a Python program on every host, like `run_on` with `python -c`.

    The processes have torch preloaded; four of them start in less than a second.
    """
    return run_programs(
        [host.name for host in machines for _ in range(ranks_per_host)],
        text,
        *args,
        environ=_world(machines, ranks_per_host),
        timeout_s=timeout_s,
    )


def _world(machines: Sequence[Host], ranks_per_host: int) -> dict[str, str]:
    """Return the environment variables that all ranks share; the first rank hosts the store."""
    return {
        "WORLD_SIZE": str(len(machines) * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": "29400",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
    }
