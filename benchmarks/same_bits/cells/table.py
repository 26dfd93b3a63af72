"""Build the table of cells from their records: which cells have the reference's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.runner.table import Table
from benchmarks.same_bits.cells.plan import ENGINES, KINDS, REFERENCE, SIZES, cells

Record = dict[str, Any]
_HASHES = ("sha256", "losses_and_norms_sha256")


def has_ended(record: Record) -> bool:
    """Return whether a training ended, with the same bits on all of its ranks."""
    return "sha256" in record


def same_bits(record: Record, records: Sequence[Record]) -> bool:
    """Return whether a training has the bits of a reference from the same kind of machine."""
    return has_ended(record) and any(
        one["cell"] == REFERENCE.name
        and _machine(one) == _machine(record)
        and all(one.get(name) == record[name] for name in _HASHES)
        for one in records
    )


def table(records: Sequence[Record]) -> Table:
    """Return the table: one row per layout and engine, one column per number of ranks."""
    known = {one["cell"]: one for one in records}
    names = {(cell.kind, cell.num_ranks, cell.engine): cell.name for cell in cells()}

    def mark(kind: str, num_ranks: int, engine: str) -> str:
        name = names.get((kind, num_ranks, engine))
        if name is None:
            return "-"
        if name not in known:
            return "not run"
        if not has_ended(known[name]):
            return "**failed**"
        return "same" if same_bits(known[name], records) else "**differs**"

    rows = [
        [f"{kind}, {engine}", *(mark(kind, size, engine) for size in (*SIZES, 0))]
        for kind in KINDS
        for engine in ENGINES
    ]
    columns = ["layout, engine", *(f"N = {size}" for size in SIZES), "changing"]
    alignments = ["left", *["right"] * (len(SIZES) + 1)]
    about = {
        "records": "benchmarks/results/same_bits/cells.jsonl",
        "commits": sorted({one["commit"] for one in records}),
        "loads": [min(_loads(records), default=0.0), max(_loads(records), default=0.0)],
    }
    return Table(columns, alignments, rows, about)


def _machine(record: Record) -> tuple[Any, ...]:
    """Return the conditions that must match for equal bits: processor, versions and batches."""
    conditions = record["conditions"]
    return conditions["processor"], conditions["peers"], record["steps"], record["micro_batches"]


def _loads(records: Sequence[Record]) -> list[float]:
    names = ("load_before", "load_after")
    return [float(one["conditions"][name]) for one in records for name in names]
