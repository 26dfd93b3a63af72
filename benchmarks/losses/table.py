"""Build the table of losses by kind from the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.losses.plan import HOST, HOSTS, TORCHRUN
from benchmarks.runner.table import Table

Record = dict[str, Any]
_RANKS = {"kill": "killed", "stop": "stopped (SIGSTOP)", "hang": "hung in a lock"}
_NODES = {"kill node": "launcher and ranks killed", "cut": "link cut"}
KINDS = (
    *(f"{HOST}: rank {how}" for how in _RANKS.values()),
    *(f"{HOSTS}: rank {how}" for how in _RANKS.values()),
    *(f"{HOSTS}: node, {how}" for how in _NODES.values()),
    f"{HOSTS}: both copies of a shard, ranks killed",
    f"{HOSTS}: both copies of a shard, nodes killed",
    f"{TORCHRUN}: rank killed",
)


def kind_of(layout: str, loss: Mapping[str, Any]) -> str:
    """Return the row of a loss; if the checkpoint was loaded, both copies had been lost."""
    if loss["checkpoint"] is not None:
        return f"{layout}: both copies of a shard, {'nodes' if loss['nodes'] else 'ranks'} killed"
    if loss["nodes"]:
        return f"{layout}: node, {_NODES[loss['how']]}"
    return f"{layout}: rank {_RANKS[loss['how']]}"


def is_right(record: Record) -> bool:
    """Return whether a training succeeded with the bits of the undisturbed one."""
    return "failed" not in record and record["bits"] == [record["expected"]]


def table(records: Sequence[Record]) -> Table:
    """Return the table, with one row per kind of loss."""
    rows = [_row(kind, list(_of(kind, records))) for kind in KINDS]
    rows = [row for row in rows if row[1] != "0"]
    columns = ["what was lost", "losses", "ranks", "same bits", "median", "largest"]
    about = {
        "records": "benchmarks/results/losses/losses.jsonl",
        "trainings": len(records),
        "commits": sorted({one["commit"] for one in records}),
        "loads": [min(_loads(records), default=0.0), max(_loads(records), default=0.0)],
    }
    return Table(columns, ["left", *["right"] * 5], rows, about)


def num_losses(records: Sequence[Record]) -> int:
    """Return the number of losses that have occurred."""
    return sum(len(one["losses"]) for one in records)


def _of(kind: str, records: Sequence[Record]) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    for record in records:
        for loss in record["losses"]:
            if kind_of(record["layout"], loss) == kind:
                yield record, loss


def _row(kind: str, found: Sequence[tuple[Record, Mapping[str, Any]]]) -> list[str]:
    took = [loss["took_s"] for _, loss in found if loss["took_s"] is not None]
    times = [f"{statistics.median(took):.2f} s", f"{max(took):.2f} s"] if took else ["-", "-"]
    num_ranks = sum(len(loss["ranks"]) for _, loss in found)
    num_right = sum(is_right(record) for record, _ in found)
    return [kind, str(len(found)), str(num_ranks), str(num_right), *times]


def _loads(records: Sequence[Record]) -> list[float]:
    names = ("load_before", "load_after")
    return [float(one["conditions"][name]) for one in records for name in names]
