"""Kill one of three ranks under echelon, torchft and torchrun; compare recovery and weights.

    python -m benchmarks.losses.peers                # 5 kills under each
    python -m benchmarks.losses.peers --table        # of all records so far

All contenders have the same model, samples and kills: the rank, the step and the moment in it are
drawn from the training's number. The contenders run in turn, in a different order for each number.
torchrun restarts the same program, which saves its state at each step. A recovery time lasts from
the kill to the next step committed without the lost rank, less the training's median time between
two commits. Weights and optimizer state must have the hash of an undisturbed training under the
same software. If torchft is not installed, it is skipped.

Records are lines of JSON, appended as each training ends; a training with a record is not run
again. The table is stored for the docs: `make bench-docs` inserts it into the page.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.losses import job, preloaded, torchft
from benchmarks.losses.plan import HOST, TORCHRUN, Plan, compared
from benchmarks.losses.run import described, measured, read
from benchmarks.losses.table import is_right
from benchmarks.runner.options import resumable
from benchmarks.runner.place import RESULTS
from benchmarks.runner.table import Table

Record = dict[str, Any]
_OUT = RESULTS / "losses" / "peers.jsonl"
_TABLE = RESULTS / "losses" / "peers.json"
_NAMES = {
    HOST: "echelon, `resilient`",
    **{name: name for name in torchft.SETTINGS},
    TORCHRUN: "torchrun, restart from the last step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a training failed or one of echelon's has wrong bits."""
    options = _options(arguments)
    if not options.table:
        run(options)
    records = read(options.out)
    found = table(records)
    if options.out == _OUT:
        found.save(_TABLE)
    print(found.markdown())
    ours = [one for one in records if one["layout"] == HOST]
    failed = [one for one in records if "failed" in one]
    return 0 if all(map(is_right, ours)) and not failed else 1


def run(options: argparse.Namespace) -> None:
    """Run the trainings that have no record, within the limits of the options."""
    layouts = [HOST, TORCHRUN]
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: only the others are measured", file=sys.stderr)
    else:
        layouts += torchft.SETTINGS
        preloaded.also("torchft.optim")
    until_s = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="losses-"))
    undisturbed = _Undisturbed(folder)
    for number in range(options.kills):
        for layout in random.Random(number).sample(layouts, len(layouts)):
            plan = compared(layout, number)
            if any(one["training"] == plan.name for one in read(options.out)):
                continue
            if time.monotonic() > until_s or os.getloadavg()[0] > options.most_load:
                print(f"{plan.name}: left for another run", file=sys.stderr)
                return
            record = _record(plan, folder, undisturbed)
            with options.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(f"{_NAMES[layout]}: {described(record)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)


class _Undisturbed:
    """The results of trainings without losses, computed on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ours = ""
        self._theirs: dict[str, tuple[str, Path]] = {}

    def of_echelon(self) -> str:
        """Return the hash of echelon's training on one rank, the same for any number of ranks."""
        self._ours = self._ours or job.reference(self._folder / "reference")
        return self._ours

    def of_torchft(self, layout: str) -> tuple[str, Path]:
        """Return the hash of three replicas with a layout's group, and their file of weights."""
        group = torchft.SETTINGS[layout].group
        if group not in self._theirs:
            name = next(one for one, how in torchft.SETTINGS.items() if how.group == group)
            plan = Plan(
                layout=name, number=-1, num_nodes=1, ranks_per_node=3, is_sharded=False, faults=()
            )
            folder = self._folder / f"undisturbed {group}"
            record = torchft.train(plan, folder)
            if "failed" in record or len(record["bits"]) != 1 or record["samples_left_out"]:
                raise RuntimeError(f"the undisturbed training failed: {record}")
            self._theirs[group] = record["bits"][0], folder / "0.weights"
        return self._theirs[group]


def _record(plan: Plan, top: Path, undisturbed: _Undisturbed) -> Record:
    folder = top / plan.name.replace(" ", "_")
    if plan.layout not in torchft.SETTINGS:
        return measured(lambda: job.train(plan, folder), undisturbed.of_echelon())
    expected, weights = undisturbed.of_torchft(plan.layout)

    def train() -> Record:
        record = torchft.train(plan, folder)
        return {**record, "distance": torchft.distance(folder, weights)}

    return measured(train, expected, peers=("torch", "torchft"))


def table(records: Sequence[Record]) -> Table:
    """Return the table, with one row per contender."""
    by_layout = {layout: [one for one in records if one["layout"] == layout] for layout in _NAMES}
    rows = [_row(layout, found) for layout, found in by_layout.items() if found]
    columns = ["", "kills", "finished", "same bits", "samples left out", "median", "largest"]
    loads = [
        float(one["conditions"][name]) for one in records for name in ("load_before", "load_after")
    ]
    about = {
        "records": "benchmarks/results/losses/peers.jsonl",
        "commits": sorted({one["commit"] for one in records}),
        "loads": [min(loads, default=0.0), max(loads, default=0.0)],
    }
    return Table(columns, ["left", *["right"] * 6], rows, about)


def _row(layout: str, records: Sequence[Record]) -> list[str]:
    took = [
        loss["took_s"] for one in records for loss in one["losses"] if loss["took_s"] is not None
    ]
    times = [f"{statistics.median(took):.2f} s", f"{max(took):.2f} s"] if took else ["-", "-"]
    counts = [
        sum(len(one["losses"]) for one in records),
        sum("failed" not in one for one in records),
        sum(map(is_right, records)),
    ]
    return [_NAMES[layout], *map(str, counts), _left_out(records), *times]


def _left_out(records: Sequence[Record]) -> str:
    """Return the number of micro-batches in no committed step; equal bits imply 0."""
    found = [one.get("samples_left_out", 0 if is_right(one) else None) for one in records]
    known = [one for one in found if one is not None]
    return str(sum(known)) if len(known) == len(found) else "-"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = resumable(__doc__, _OUT)
    parser.add_argument("--kills", type=int, default=5, help="under each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
