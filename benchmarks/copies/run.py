"""What copies of shards cost: a step of a sharded training with and without them.

    python -m benchmarks.copies.run [--ranks 4] [--models 10.7M] [--tokens 512] [--turns 6]

A char GPT, float32, AdamW, `SameBits`, divided among the ranks of one host; `--models 10.7M,85M`
adds a larger one. A step with copies is followed by what `resilient.run` does then: all shards and
their optimizer state are copied into shared memory, with a CRC. Steps of both kinds alternate in
one training, in random order, so that other work on the machine affects both. A step takes as long
as its slowest rank. The ratio of the ranks' mean processor time is affected less by other work.
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

KINDS = ("plain", "copied")
COLUMNS = (
    ("model", "left"),
    ("step, s", "right"),
    ("with copies, s", "right"),
    ("ratio", "right"),
    ("ratio of processor time", "right"),
    ("memory of the copies per rank, MiB", "right"),
)
_RANK = Path(__file__).with_name("rank.py")


def main() -> None:
    """Measure all cases and show them."""
    made = parser(__doc__, rounds=3)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--models", default="10.7M")
    made.add_argument("--tokens", type=int, default=512, help="per rank and step")
    made.add_argument("--turns", type=int, default=6, help="steps of each kind per round")
    options = made.parse_args()
    conditions = Conditions(["torch"])
    cases = [
        Case(name=model, sides={"": _side(options, model)}) for model in options.models.split(",")
    ]
    samples = measure(cases, options.rounds, seed=options.seed)
    rows = [_row(name, found) for name, found in samples.items()]
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


def _row(name: str, found: Samples) -> list[str]:
    def ratio(unit: str) -> str:
        pairs = zip(found[f"copied {unit}"], found[f"plain {unit}"], strict=True)
        return spread([ours / peer for ours, peer in pairs])

    walls = [spread(found[f"{kind} wall"]) for kind in KINDS]
    return [name, *walls, f"**{ratio('wall')}**", ratio("cpu"), f"{middle(found['MiB']):.0f}"]


if __name__ == "__main__":
    main()
