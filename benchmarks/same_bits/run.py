"""Measure the cost of the same bits: steps of `SameBits` and steps with sums in rank order.

    python -m benchmarks.same_bits.run [--ranks 4] [--per-rank 1,2,4,8] [--tokens 512] [--turns 5]

The model is a char GPT of 10.7M parameters in float32, with AdamW and gradients clipped by their
norm. Each rank has `--per-rank` micro-batches per step; the peer accumulates their gradients in
`.grad` and reduces once, in rank order. The ranks of a case hold both trainings and take a step of
each in turn, in random order, so that other work on the machine affects both. A step takes as long
as its slowest rank. The last column is the ratio of the ranks' mean CPU time, which is less
affected by other work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import child_environ
from benchmarks.runner.rounds import Case, Figures, Measure, Samples, measure, middle, spread

KINDS = ("rank-ordered", "canonical")
COLUMNS = (
    ("layout, micro-batches per rank", "left"),
    ("rank order, s", "right"),
    ("same bits, s", "right"),
    ("ratio", "right"),
    ("ratio of processor time", "right"),
)
_RANK = Path(__file__).with_name("rank.py")


def main() -> None:
    """Measure all cases and print the table."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--per-rank", default="1,2,4,8")
    made.add_argument("--layouts", default="replicated,sharded")
    made.add_argument("--tokens", type=int, default=512, help="per micro-batch")
    made.add_argument("--turns", type=int, default=3, help="steps of each kind per round")
    options = made.parse_args()
    conditions = Conditions(["torch"])
    cases = [
        Case(name=f"{layout}, {count}", sides={"": _side(options, layout, int(count))})
        for layout in options.layouts.split(",")
        for count in options.per_rank.split(",")
    ]
    samples = measure(cases, options.rounds, seed=options.seed)
    rows = [_row(name, found) for name, found in samples.items()]
    finish(options, conditions, COLUMNS, rows, samples)


def _side(options: argparse.Namespace, layout: str, per_rank: int) -> Measure:
    def run(number: int) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "samples.json")
            subprocess.run(
                [
                    sys.executable, "-m", "echelon", "run", f"--nproc-per-node={options.ranks}",
                    f"--run-dir={folder}/run", str(_RANK), f"--layout={layout}",
                    f"--per-rank={per_rank}", f"--tokens={options.tokens}",
                    f"--turns={options.turns}", f"--order={number}", f"--out={out}",
                ],
                check=True, stdout=sys.stderr, env=child_environ(),
            )  # fmt: skip
            samples = json.loads(out.read_text())
        return {
            f"{kind} {unit}": middle([taken[place] for taken in samples[kind]])
            for kind in KINDS
            for place, unit in enumerate(("wall", "cpu"))
        }

    return run


def _row(name: str, found: Samples) -> list[str]:
    def ratio(unit: str) -> str:
        pairs = zip(found[f"canonical {unit}"], found[f"rank-ordered {unit}"], strict=True)
        return spread([ours / peer for ours, peer in pairs])

    walls = [spread(found[f"{kind} wall"]) for kind in KINDS]
    return [name, *walls, f"**{ratio('wall')}**", ratio("cpu")]


if __name__ == "__main__":
    main()
