"""Lose ranks, nodes and copies at random moments; compare the bits, and measure the recovery.

    python -m benchmarks.losses.run                       # 30 losses of each layout
    python -m benchmarks.losses.run --layout "three hosts" --losses 60   # until so many struck
    python -m benchmarks.losses.run --only "one host 7"   # one training again
    python -m benchmarks.losses.run --table               # of all records so far

A training has a layout and a number, from which its losses are drawn: see `plan`. At its end, the
hash of weights and optimizer state must equal that of an undisturbed training on one rank. A
recovery time lasts from the loss to the next commit of a step that was trained without the lost
ranks, less the training's median time between two commits.

Records are lines of JSON, appended as each training ends. A training with a record is not run
again, whatever its result. The table is stored for the docs: `make bench-docs` inserts it into the
page. The peer is torchrun with `--max-restarts`: there, the same program saves its state at each
step, and one rank is killed per training.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.losses.job import Record, reference, train
from benchmarks.losses.plan import LAYOUTS, Plan, plan_of
from benchmarks.losses.table import is_right, num_losses, table
from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import resumable
from benchmarks.runner.place import RESULTS, ROOT

_OUT = RESULTS / "losses" / "losses.jsonl"
_TABLE = RESULTS / "losses" / "losses.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a training failed or ended with wrong bits."""
    options = _options(arguments)
    if not options.table:
        run(options)
    records = read(options.out)
    found = table(records)
    if options.out == _OUT:
        found.save(_TABLE)
    print(found.markdown())
    return 0 if all(map(is_right, records)) else 1


def run(options: argparse.Namespace) -> None:
    """Run the trainings that have no record, within the limits of the options."""
    until_s = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="losses-"))
    expected = _expected(options.out, folder)
    for plan in _plans(options):
        if time.monotonic() > until_s or os.getloadavg()[0] > options.most_load:
            print(f"{plan.name}: left for another run", file=sys.stderr)
            return
        own = folder / plan.name.replace(" ", "_")
        record = measured(functools.partial(train, plan, own), expected)
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(described(record), file=sys.stderr, flush=True)
        if is_right(record):
            shutil.rmtree(own)
        else:
            print(f"{plan.name}: its files are kept in {own}", file=sys.stderr, flush=True)


def _expected(out: Path, folder: Path) -> str:
    """Return the hash of the undisturbed training, which depends on the processor and torch."""
    conditions = Conditions(peers=("torch",)).told()
    machine = [conditions["processor"], conditions["peers"]]
    for record in read(out):
        if [record["conditions"]["processor"], record["conditions"]["peers"]] == machine:
            return str(record["expected"])
    return reference(folder / "reference")


def _plans(options: argparse.Namespace) -> Iterator[Plan]:
    if options.only:
        layout, _, number = options.only.rpartition(" ")
        yield plan_of(layout, int(number))
        return
    for layout in options.layout or LAYOUTS:
        for number in itertools.count():
            known = [one for one in read(options.out) if one["layout"] == layout]
            if num_losses(known) >= options.losses:
                break
            plan = plan_of(layout, number)
            if all(one["training"] != plan.name for one in known):
                yield plan


def measured(
    train: Callable[[], Record], expected: str, peers: Sequence[str] = ("torch",)
) -> Record:
    """Run a training; return its record with the expected hash and the conditions."""
    conditions, commit, began_s = Conditions(peers=peers), _commit(), time.monotonic()
    return {
        **train(),
        "expected": expected,
        "wall_s": round(time.monotonic() - began_s, 1),
        "commit": commit,
        "conditions": conditions.told(),
    }


def described(record: Record) -> str:
    """Format a record as one line of text."""
    losses = [
        f"{one['how']} {list(one['ranks'])} {one['moment']} at {one['at_step']}: "
        + (f"{one['took_s']:.2f} s" if one["took_s"] is not None else "no further commit")
        + (f", from step {one['checkpoint']}" if one["checkpoint"] is not None else "")
        for one in record["losses"]
    ]
    bits = "same bits" if record["bits"] == [record["expected"]] else "OTHER BITS"
    told = f"FAILED: {record['failed']}" if "failed" in record else bits
    return f"{record['training']}: {told} ({record['wall_s']} s): {'; '.join(losses)}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    return done.stdout.strip()


def read(path: Path) -> list[Record]:
    """Return all records in a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = resumable(__doc__, _OUT)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only this one")
    parser.add_argument("--losses", type=int, default=30, help="of each layout, at least")
    parser.add_argument("--only", metavar="TRAINING", help="run this one, also if it has a record")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
