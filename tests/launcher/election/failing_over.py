"""Jobs with failover, one node per host, whose ranks write a history of their worlds.

Each rank writes one line per moment, with the world to which it belongs; `worlds` reads all of
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.launcher.background import Node
from tests.launcher.cluster import Cluster
from tests.support.hosts import Host

_RANK = """
import os, sys, time
env = os.environ
world = env["MASTER_ADDR"] + ":" + env["MASTER_PORT"] + "-" + env["TORCHELASTIC_RESTART_COUNT"]
with open(env["HISTORY"], "a", buffering=1) as history:
    print("training", env["WORLD_SIZE"], flush=True)
    while True:
        history.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f} {world}\\n")
        if world.endswith("-0") and os.path.exists(env["HISTORY"] + ".fail"):
            sys.exit(7)
        time.sleep(0.01)
"""


SECRET = "a-secret-of-the-tests"


def elastic(nodes: str, lost_after_s: float) -> tuple[str, ...]:
    """Return the options of an elastic job whose nodes may be silent for so long."""
    conf = f"last_call_timeout=60,lost_after={lost_after_s},failover=true"
    return ("--nnodes", nodes, "--shutdown-timeout", "1", "--rdzv-conf", conf)


class FailingOver:
    """A node on each host, one rank each."""

    def __init__(
        self,
        folder: Path,
        made: list[Host],
        *options: str,
        witness: WitnessProcess | None = None,
    ) -> None:
        self.hosts = made
        self.witness = witness
        self.folder = folder
        self.cluster = Cluster(folder, _RANK, endpoint=f"{made[0].address}:29400")
        for index, host in enumerate(made):
            self.cluster.start(
                *options, rank=index, nproc=1, before=host.command(),
                environ={"HISTORY": str(folder / f"history_{index}")},
            )  # fmt: skip
        for node in self.nodes:
            node.wait_for(f"training {len(made)}")

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def kill(self, index: int) -> None:
        """Kill a node's launcher, its guard, its store and its ranks."""
        for pid in self.cluster.marked(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def fail(self, index: int) -> None:
        """Let a node's rank of the first world fail."""
        (self.folder / f"history_{index}.fail").touch()

    def worlds(self) -> list[tuple[str, float, float]]:
        """Return each world with the first and the last moment at which any rank of it ran."""
        spans: dict[str, tuple[float, float]] = {}
        for path in self.folder.glob("history_?"):
            for line in path.read_text().splitlines():
                moment, _, world = line.partition(" ")
                if not world.rpartition("-")[2]:
                    continue  # cut off by SIGKILL
                first, last = spans.get(world, (float(moment), float(moment)))
                spans[world] = min(first, float(moment)), max(last, float(moment))
        return sorted(((w, *span) for w, span in spans.items()), key=lambda one: one[1])

    def assert_one_world_at_a_time(self) -> None:
        for (_, _, last), (_, first, _) in pairwise(self.worlds()):
            assert last < first, self.worlds()

    def stop(self) -> list[int]:
        """End the nodes that remain; return all exit codes."""
        for node in self.nodes:
            node.process.send_signal(signal.SIGTERM)
        return [node.end() for node in self.nodes]


class WitnessProcess:
    """An `echelon witness` on a host of its own."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.endpoint = f"{host.address}:29402"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.host.command(sys.executable, "-m", "echelon", "witness"),
            env={**os.environ, "ECHELON_SECRET": SECRET},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "witness at 0.0.0.0:29402\n"
        return process

    def kill(self) -> None:
        """End it with SIGKILL. Safe to call twice."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()

    def restart(self) -> None:
        """Kill it, and start another one."""
        self.kill()
        self._process = self._start()

    def end(self) -> int:
        """Ask it to end; return its exit code."""
        self._process.terminate()
        self._process.communicate(timeout=60)
        return self._process.returncode

    def close(self) -> None:
        """End it, if it has not ended."""
        self.kill()
