"""Several `echelon run` processes that form one job, on loopback or on hosts of their own."""

from __future__ import annotations

import os
import select
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launcher.background import Node
from tests.support.ports import free_port


class Cluster:
    """A folder, an endpoint, and the nodes that were started with them.

    Args:
        script: what every rank runs: the text of a Python script, or its path.
        args: the script's arguments.
        endpoint: where the nodes meet; None means a free port on loopback.
    """

    def __init__(
        self, folder: Path, script: str | Path, *args: str, endpoint: str | None = None
    ) -> None:
        self.folder = folder
        self.args = args
        self.mark = f"{os.getpid()}-{folder.name}"
        if isinstance(script, Path):
            self.script = script
        else:
            self.script = folder / "train.py"
            self.script.write_text(textwrap.dedent(script))
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.nodes: list[Node] = []
        self.run_dir: Path | None = None  # None: one for each node

    def start(
        self,
        *options: str,
        rank: int | None = None,
        nproc: int = 2,
        secret: str = "a-secret-of-the-tests",
        before: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Node:
        """Start the next node."""
        place = [] if rank is None else ["--node-rank", str(rank)]
        meeting = ["--rdzv-endpoint", self.endpoint, "--nproc-per-node", str(nproc)]
        node = Node(
            self.run_dir or self.folder / f"node_{len(self.nodes)}",
            [*meeting, *place, *options, str(self.script), *self.args],
            before=before,
            environ={
                "ECHELON_SECRET": secret,
                "ECHELON_TEST_MARK": f"{self.mark}-{len(self.nodes)}-",
                **(environ or {}),
            },
        )
        self.nodes.append(node)
        return node

    def marked(self, node: int | None = None) -> list[int]:
        """Return the living processes of one node, or of all."""
        return marked(self._mark_of(node))

    def left(self, node: int | None = None) -> list[int]:
        """Return the processes that survive, once those that are ending have ended."""
        return left(self._mark_of(node))

    def told(self) -> str:
        """Return all that the nodes have printed, for a failed assertion."""
        return "\n".join(
            f"node {number}: {line}"
            for number, node in enumerate(self.nodes)
            for line in node.lines
        )

    def close(self) -> None:
        """End what still runs."""
        for node in self.nodes:
            node.close()

    def _mark_of(self, node: int | None) -> str:
        return f"ECHELON_TEST_MARK={self.mark}-{'' if node is None else f'{node}-'}"


def marked(mark: str) -> list[int]:
    """Return the living processes whose environment has a mark, `NAME=VALUE` or a prefix of it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def left(mark: str) -> list[int]:
    """Return the marked processes that survive, once those that are ending have ended."""
    deadline = time.monotonic() + 30
    while (pids := marked(mark)) and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    return pids
