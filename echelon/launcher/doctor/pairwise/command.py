"""Add the options of `echelon doctor --pairwise`, and run its measurements."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from echelon.launcher.control.endpoint import Rendezvous
from echelon.launcher.control.tls import TlsFiles
from echelon.launcher.doctor.check import Check
from echelon.launcher.doctor.pairwise.collective import measure_collective
from echelon.launcher.doctor.pairwise.outcome import Outcome, note_ranks
from echelon.launcher.doctor.probes.child import run_all
from echelon.launcher.options.arguments import Defaults
from echelon.launcher.options.texts import num_workers

_NAME = "pairwise"  # the name of the line that carries an outcome between nodes


def add_pairwise_options(group: argparse._ArgumentGroup, default: Defaults) -> None:
    """Add the options that enable and configure the pairwise measurements."""
    group.add_argument(
        "--pairwise",
        action="store_true",
        help="measure latency and bandwidth of every pair of nodes (on one node, of its ranks), "
        "the disk, memory and GPUs of each node, and an all_reduce of all ranks; name slow ones",
    )
    group.add_argument(
        "--nproc-per-node",
        type=num_workers,
        default=default("nproc_per_node", "2"),
        metavar="N",
        help="ranks per node, as for `echelon run` (default 2)",
    )
    group.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="backend of the all_reduce (default: that of dist.init())",
    )
    group.add_argument(
        "--run-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder on the disk to test (default: the working directory)",
    )


class Pairwise:
    """One run of the pairwise measurements.

    Attributes:
        outcome: the measurements so far.
        has_met: whether this node has begun to measure together with other nodes.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.has_met = False
        self.outcome = Outcome(hosts=[], names=[])

    def across(
        self, meeting: Rendezvous, num_nodes: int, timeout_s: float, tls: TlsFiles | None
    ) -> Iterator[Check]:
        """Connect to the other nodes and measure the links; yield the results of the checks.

        All nodes must call this method.
        """
        from echelon.launcher.doctor.checkup import Host, Result, check_nodes  # gRPC
        from echelon.launcher.doctor.pairwise.measuring import measure

        def measured(host: Host) -> Iterator[Result]:
            yield Result(_NAME, json.dumps(measure(host).to_json()))

        self.has_met = True
        folder = str(self._args.run_dir.absolute())
        is_complete = True
        for result in check_nodes(
            meeting, num_nodes, timeout_s, tls, folder=folder, measure=measured
        ):
            if result.name == _NAME:
                self.outcome = Outcome.from_json(json.loads(result.text))
            else:
                is_complete &= result.ok or result.name in ("clocks", "versions")
                yield Check(result.name, result.text, result.ok)
        if is_complete and self.outcome.is_whole:
            self.outcome.collective = measure_collective(self._args, meeting)
        else:
            self.outcome.collective = {"error": "not run: mend what is broken first"}

    def alone(self) -> None:
        """Measure this machine and the links between its ranks. Blocks for up to two minutes."""
        from echelon.launcher.doctor.pairwise.measuring import own_tasks

        found = run_all(own_tasks(str(self._args.run_dir.absolute())))
        collective = measure_collective(self._args, None)
        rows = collective.pop("pairs", [])
        ranks = [f"rank {rank}" for rank in range(collective.get("ranks", 0))]
        self.outcome = Outcome(
            hosts=[socket.gethostname()], names=ranks, nodes=[found], collective=collective
        )
        note_ranks(self.outcome, rows)
