"""Store the measurements of a job's nodes and links, and find slow or broken nodes and links."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from echelon.launcher.doctor.pairwise.outliers import best_of, outliers, slow_ones
from echelon.launcher.doctor.pairwise.schedule import Pair
from echelon.launcher.doctor.probes.finding import NETWORK, STORAGE, Finding

LATENCY, SENT, RECEIVED = "latency_s", "sent_bytes_per_s", "received_bytes_per_s"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """All measurements of a job's nodes and links.

    Attributes:
        hosts: the host names of the nodes.
        names: the names of the members that form pairs: the nodes, or the ranks of a single node.
        pairs: the finding for each measured pair, keyed by the indices of its members in `names`.
        nodes: the findings about each host's own resources, in the order of `hosts`.
        collective: the measurement of an all-reduce across all ranks, which uses the job's
            backend; None if not measured.
    """

    hosts: list[str]
    names: list[str]
    pairs: dict[Pair, Finding] = field(default_factory=dict)
    nodes: list[list[Finding]] = field(default_factory=list)
    collective: dict[str, Any] | None = None

    @property
    def is_whole(self) -> bool:
        """True if nothing is broken, even if a node or link is slow."""
        found = [*self.pairs.values(), *(one for node in self.nodes for one in node)]
        return not any(one.is_broken for one in found) and not (self.collective or {}).get("error")

    def costs(self) -> dict[str, dict[Pair, float]]:
        """Return the costs of each pair that is not broken, under "latency" and "bandwidth".

        The "latency" cost is the latency in seconds. The "bandwidth" cost is the inverse of the
        bandwidth in the slower direction, in seconds per byte.
        """
        whole = {pair: one.figures for pair, one in self.pairs.items() if not one.is_broken}
        return {
            "latency": {pair: figures[LATENCY] for pair, figures in whole.items()},
            "bandwidth": {
                pair: 1 / max(min(figures[SENT], figures[RECEIVED]), 1e-9)
                for pair, figures in whole.items()
            },
        }

    def slow(self) -> Iterator[tuple[str, str]]:
        """Yield (name, what is slow) for each slow member, slow pair, and host with a slow disk."""
        for kind, costs in self.costs().items():
            members, pairs = slow_ones(costs)
            best = best_of(costs)
            for member in members:
                times = _times(best[member], best.values())
                yield self.names[member], f"{kind} of all its pairs, {times} of the others' best"
            for pair in pairs:
                yield self.name_of(pair), f"{kind}, {_times(costs[pair], costs.values())}"
        for name, took_s in self._slow_disks():
            yield name, f"fsync takes {took_s * 1e3:.0f} ms"

    def _slow_disks(self) -> Iterator[tuple[str, float]]:
        took = {
            number: one.figures["fsync_s"]
            for number, node in enumerate(self.nodes)
            for one in node
            if one.probe == STORAGE and "fsync_s" in one.figures
        }
        for number in outliers(took):
            yield self.hosts[number], took[number]

    def name_of(self, pair: Pair) -> str:
        """Return the name of a pair, such as "host1 - host2"."""
        return f"{self.names[pair[0]]} - {self.names[pair[1]]}"

    def to_json(self) -> dict[str, Any]:
        """Return the measurements in a JSON-serializable form, which `--json` prints."""
        return {
            "hosts": self.hosts,
            "names": self.names,
            "pairs": [
                {"pair": list(pair), **finding.to_json()} for pair, finding in self.pairs.items()
            ],
            "nodes": [[one.to_json() for one in node] for node in self.nodes],
            "slow": [{"what": what, "how": how} for what, how in self.slow()],
            "collective": self.collective,
            "whole": self.is_whole,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """Rebuild an outcome from the output of `to_json`.

        The data is not fully validated, so it must come from a member of the job.
        """
        return cls(
            hosts=values["hosts"],
            names=values["names"],
            pairs={(a, b): _finding(one) for one in values["pairs"] for a, b in [one.pop("pair")]},
            nodes=[[_finding(one) for one in node] for node in values["nodes"]],
            collective=values["collective"],
        )


def note_ranks(outcome: Outcome, rows: Sequence[Sequence[float]]) -> None:
    """Add measurements of links, each given as [rank, rank, latency in s, bytes per s]."""
    for a, b, latency_s, bytes_per_s in rows:
        figures = {LATENCY: latency_s, SENT: bytes_per_s, RECEIVED: bytes_per_s}
        finding = _finding({"probe": NETWORK, "state": "whole", "text": "", "figures": figures})
        outcome.pairs[int(a), int(b)] = finding


def _times(cost: float, costs: Iterable[float]) -> str:
    return f"{cost / median(costs):.1f} times worse than the median"


def _finding(values: dict[str, Any]) -> Finding:
    return Finding.unpack(json.dumps(values))
