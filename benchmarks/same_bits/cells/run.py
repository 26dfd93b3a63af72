"""Train in every layout, on every number of ranks and engine, and compare all bits.

    python -m benchmarks.same_bits.cells.run                # all cells without a record
    python -m benchmarks.same_bits.cells.run --minutes 30 --most-load 2   # within these limits
    python -m benchmarks.same_bits.cells.run --cells HSDP   # those with HSDP in their name
    python -m benchmarks.same_bits.cells.run --table        # of all records so far

A small model with dropout is trained for 200 steps of 9 micro-batches. Losses, norms, weights and
optimizer state must have the bits of one process without sharding. Records are lines of JSON,
written as soon as a cell is over. A cell with a record is not run again, unless it failed; a cell
whose bits differ keeps its record until that line is deleted. The table is stored for the docs:
`make bench-docs` inserts it into the page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import resumable
from benchmarks.runner.place import RESULTS, ROOT
from benchmarks.same_bits.cells.plan import ENGINES, REFERENCE, Cell, cells
from benchmarks.same_bits.cells.table import Record, has_ended, same_bits, table
from tests.support.ranks import RanksFailedError, run_ranks
from tests.train.same_bits.staged import train

_MICRO_BATCHES = 9  # an incomplete tree, and uneven runs on 2, 4, 6 and 8 ranks
_OUT = RESULTS / "same_bits" / "cells.jsonl"
_TABLE = RESULTS / "same_bits" / "cells.json"
_STEPS = 200
_TIMEOUT_S = 7200.0  # of a part: the command is meant to run beside other work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a cell failed or its bits differ."""
    options = _options(arguments)
    if not options.table:
        run(options)
    records = _read(options.out, options.steps)
    found = table(records)
    if options.out == _OUT and options.steps == _STEPS:
        found.save(_TABLE)
    print(found.markdown())
    return 0 if all(same_bits(one, records) for one in records) else 1


def run(options: argparse.Namespace) -> None:
    """Run the cells that have no record, within the limits of the options."""
    known = {one["cell"] for one in _read(options.out, options.steps) if has_ended(one)}
    until_s = time.monotonic() + 60 * options.minutes
    wanted = [one for one in cells() if one == REFERENCE or options.cells in one.name]
    for cell in wanted:
        if cell.name in known:
            continue
        if time.monotonic() > until_s or os.getloadavg()[0] > options.most_load:
            print(f"{cell.name}: left for another run", file=sys.stderr)
            continue
        record = _record(cell, options.steps)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        told = record.get("failed", record.get("sha256", ""))
        print(f"{cell.name}: {told} ({record['wall_s']} s)", file=sys.stderr, flush=True)


def _record(cell: Cell, num_steps: int) -> Record:
    conditions, commit, began_s = Conditions(peers=("torch",)), _commit(), time.monotonic()
    try:
        found = _train(cell, num_steps)
    except RanksFailedError as err:
        found = {"failed": str(err)}
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "num_ranks": cell.num_ranks,
        "engine": cell.engine,
        "steps": num_steps,
        "micro_batches": _MICRO_BATCHES,
        **found,
        "wall_s": round(time.monotonic() - began_s, 1),
        "commit": commit,
        "conditions": conditions.told(),
    }


def _train(cell: Cell, num_steps: int) -> Record:
    """Train all parts of a cell; return the hashes of the state and of the losses and norms."""
    backend, engine = ENGINES[cell.engine]
    losses: list[float] = []
    norms: list[float] = []
    parts = cell.parts(num_steps)
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        checkpoint = folder if len(parts) > 1 else None
        for part in parts:
            ends = run_ranks(
                train, part.num_ranks, part.layout, backend, (part.start, part.stop),
                _MICRO_BATCHES, None, checkpoint,
                environ={"ECHELON_SHM": engine} if engine else None, timeout_s=_TIMEOUT_S,
            )  # fmt: skip
            if any(end != ends[0] for end in ends):
                return {"failed": f"the ranks differ after step {part.stop}, with {part.layout}"}
            losses += ends[0][0]
            norms += ends[0][1]
    told = json.dumps([[value.hex() for value in values] for values in (losses, norms)])
    on_the_way = hashlib.sha256(told.encode()).hexdigest()
    return {
        "sha256": ends[0][2],
        "losses_and_norms_sha256": on_the_way,
        "parts": [f"{one.start}-{one.stop}: {one.num_ranks} ranks, {one.layout}" for one in parts],
    }


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    return done.stdout.strip()


def _read(path: Path, num_steps: int) -> list[Record]:
    """Return the newest record of each cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    newest = {one["cell"]: one for one in records if one["steps"] == num_steps}
    return list(newest.values())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = resumable(__doc__, _OUT)
    parser.add_argument("--cells", default="", help="run only those whose name contains this")
    parser.add_argument("--steps", type=int, default=_STEPS, help="of each training")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
