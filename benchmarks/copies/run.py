"""Measure the cost of copies of shards: steps of sharded training with and without them.

    python -m benchmarks.copies.run [--ranks 4] [--models 85M] [--tokens 128] [--turns 6]

The model is a char GPT in float32 with AdamW and `SameBits`, sharded over the ranks of one host;
`--models 10.7M,85M` adds a smaller one. A step with copies includes what `resilient.run` does for
it: all shards and their optimizer state are copied into shared memory, with a CRC, and the step
ends when the copy is complete. Either everything is copied before the step computes, or a thread
copies the optimizer's state during the computation, as in `resilient.run`. Steps of the three kinds
alternate in one training, in random order, so that other work on the machine affects all of them. A
step takes as long as its slowest rank. The ratios are relative to a step without copies; the ratio
of the ranks' mean CPU time is less affected by other work.
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

KINDS = ("plain", "before", "meanwhile")  # as in rank.py
COLUMNS = (
    ("model", "left"),
    ("ranks", "right"),
    ("step, s", "right"),
    ("copied before it, s", "right"),
    ("ratio", "right"),
    ("of processor time", "right"),
    ("copied meanwhile, s", "right"),
    ("ratio", "right"),
    ("of processor time", "right"),
    ("memory of the copies per rank, MiB", "right"),
)
_RANK = Path(__file__).with_name("rank.py")


def main() -> None:
    """Measure all cases and print the table."""
    made = parser(__doc__, rounds=3)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--models", default="85M")
    made.add_argument("--tokens", type=int, default=128, help="per rank and step")
    made.add_argument("--turns", type=int, default=6, help="steps of each kind per round")
    options = made.parse_args()
    conditions = Conditions(["torch"])
    cases = [
        Case(name=model, sides={"": _side(options, model)}) for model in options.models.split(",")
    ]
    samples = measure(cases, options.rounds, seed=options.seed)
    rows = [_row(name, options.ranks, found) for name, found in samples.items()]
    finish(options, conditions, COLUMNS, rows, samples)


def _side(options: argparse.Namespace, model: str) -> Measure:
    def run(number: int) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "samples.json")
            subprocess.run(
                [
                    sys.executable, "-m", "echelon", "run", f"--nproc-per-node={options.ranks}",
                    f"--run-dir={folder}/run", str(_RANK), f"--model={model}",
                    f"--tokens={options.tokens}", f"--turns={options.turns}", f"--order={number}",
                    f"--out={out}",
                ],
                check=True, stdout=sys.stderr, env=child_environ(),
            )  # fmt: skip
            samples = json.loads(out.read_text())
        found = {
            f"{kind} {unit}": middle([taken[place] for taken in samples[kind]])
            for kind in KINDS
            for place, unit in enumerate(("wall", "cpu"))
        }
        return {**found, "MiB": samples["bytes"] / (1 << 20)}

    return run


def _row(name: str, num_ranks: int, found: Samples) -> list[str]:
    def ratio(kind: str, unit: str) -> str:
        pairs = zip(found[f"{kind} {unit}"], found[f"plain {unit}"], strict=True)
        return spread([ours / peer for ours, peer in pairs])

    row = [name, str(num_ranks), spread(found["plain wall"])]
    for kind in KINDS[1:]:
        wall = spread(found[f"{kind} wall"])
        row += [wall, f"**{ratio(kind, 'wall')}**", ratio(kind, "cpu")]
    return [*row, f"{middle(found['MiB']):.0f}"]


if __name__ == "__main__":
    main()
