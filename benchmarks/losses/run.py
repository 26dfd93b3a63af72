"""Time from a rank's loss to the next committed step, and the bits at the end, over random losses.

    python -m benchmarks.losses.run --kills 30 --seed 1 --keep launcher/losses

Trainings of five ranks on one node lose three or four ranks each, at moments drawn from the seed:
in the forward, in the backward, after the optimizer, during the recovery from another loss, or some
microseconds after the start of a step, which may be inside a collective; some of them in the same
step. In every third training one rank is stopped (SIGSTOP) instead, which `--on-stall replace`
ends. The hash of weights and optimizer state must be that of a training that lost no rank, or the
script fails.

The peer is torchrun with `--max-restarts`: the same program, which saves its state at each step
there, and one kill per training.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import child_environ

_LIMIT_S = 600.0
_RANKS = 5
_TOTAL = 40
_LONGEST_US = 40_000
_STALL_S = 10
_MOMENTS = ("forward", "backward", "optimizer", "recovery", "us", "us")
_COLUMNS = (("ranks were", "left"), ("losses", "right"), ("median", "right"), ("largest", "right"))

Fault = tuple[int, str, str, int]  # rank, "kill" or "stop", moment, step


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training ended with.

    Attributes:
        bits: the hash of each rank that was left.
        took_s: for each loss, how it came about, and the time to the next commit, less a step.
    """

    bits: tuple[str, ...]
    took_s: tuple[tuple[str, float], ...]


def plan_of(seed: int) -> list[Fault]:
    """Return the faults of one training, at most one per rank."""
    draw = random.Random(seed)
    ranks = draw.sample(range(_RANKS), draw.randint(3, _RANKS - 1))
    step = draw.randint(0, _TOTAL // 4)
    found: list[Fault] = []
    for place, rank in enumerate(ranks):
        moment = draw.choice(_MOMENTS if place else _MOMENTS[:3] + _MOMENTS[4:])
        if moment == "us":
            moment = f"{draw.randint(0, _LONGEST_US)} us"
        if place and draw.random() < 0.6:
            step += draw.randint(1, _TOTAL // 5)
        is_stop = place == 0 and seed % 3 == 2
        when = 0 if moment == "recovery" else step  # from the first recovery that it takes part in
        found.append((rank, "stop" if is_stop else "kill", moment, when))
    return found


def train(folder: Path, launcher: Sequence[str], faults: Sequence[Fault]) -> Training:
    """Run one training.

    Raises:
        RuntimeError: it failed, or one of its faults did not happen.
    """
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(faults))
    rank = str(Path(__file__).with_name("rank.py"))
    done = subprocess.run(
        [sys.executable, "-m", *launcher, rank, str(folder), str(_TOTAL)],
        capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        stdin=subprocess.DEVNULL, env=child_environ(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    fired = [folder / f"{number}.fired" for number in range(len(faults))]
    if done.returncode or not all(path.exists() for path in fired):
        raise RuntimeError(f"{faults}: exit code {done.returncode}\n{done.stderr[-8000:]}")
    return Training(
        bits=tuple(path.read_text() for path in sorted(folder.glob("*.hash"))),
        took_s=tuple(
            (how, _took(folder, path)) for (_, how, _, _), path in zip(faults, fired, strict=True)
        ),
    )


def _took(folder: Path, fired: Path) -> float:
    """Return the time from a fault to the end of its step on the first rank, less a usual step."""
    commits = [
        [(int(step), float(at)) for step, at in map(str.split, path.read_text().splitlines())]
        for path in folder.glob("*.commits")
    ]
    step, at_s = fired.read_text().split()
    after = [
        at for one in commits for number, at in one if number >= int(step) and at > float(at_s)
    ]
    pairs = [(b[1] - a[1]) for one in commits for a, b in itertools.pairwise(one)]
    return max(0.0, min(after) - float(at_s) - statistics.median(pairs))


def echelon() -> list[str]:
    """Return the launcher's command."""
    options = ["--on-loss", "shrink", "--on-stall", "replace", "--stall-timeout", str(_STALL_S)]
    return ["echelon", "run", "--nproc-per-node", str(_RANKS), *options]


def torchrun() -> list[str]:
    """Return the peer's command."""
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS),
            "--max-restarts", "3"]  # fmt: skip


def campaign(folder: Path, seed: int, num_losses: int) -> list[tuple[str, float]]:
    """Lose at least this many ranks, and return how long each loss took.

    Raises:
        RuntimeError: a training ended with other bits than the undisturbed one, or failed.
    """
    whole = train(folder / "whole", [*echelon(), "--run-dir", str(folder / "whole.run")], [])
    (expected,) = set(whole.bits)
    found: list[tuple[str, float]] = []
    while len(found) < num_losses:
        faults = plan_of(seed)
        command = [*echelon(), "--run-dir", str(folder / f"{seed}.run")]
        one = train(folder / str(seed), command, faults)
        if set(one.bits) != {expected} or len(one.bits) != _RANKS - len(faults):
            raise RuntimeError(f"seed {seed}, {faults}: {one.bits}, not {expected}")
        found += one.took_s
        print(f"seed {seed}: {faults}: {[f'{took:.2f}' for _, took in one.took_s]} s", flush=True)
        seed += 1
    return found


def peer(folder: Path, seed: int, num_trainings: int) -> list[float]:
    """Return how long each kill took under torchrun."""
    found = []
    for number in range(num_trainings):
        rank, _, moment, step = plan_of(seed + number)[0]
        one = train(folder / f"torchrun_{number}", torchrun(), [(rank, "kill", moment, step)])
        found.append(one.took_s[0][1])
    return found


def main() -> None:
    """Run the campaign and its peer."""
    made = parser(__doc__, rounds=None)
    made.add_argument("--kills", type=int, default=30, help="the least number of losses")
    made.add_argument("--peers", type=int, default=3, help="trainings under torchrun")
    options = made.parse_args()
    seed = random.randrange(1 << 20) if options.seed is None else options.seed
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as name:
        ours = campaign(Path(name), seed, options.kills)
        theirs = peer(Path(name), seed, options.peers)
    samples = {
        "killed": [took for how, took in ours if how == "kill"],
        "stopped": [took for how, took in ours if how == "stop"],
        "killed, under torchrun": theirs,
    }
    rows = [
        [what, str(len(took)), f"{statistics.median(took):.2f} s", f"{max(took):.2f} s"]
        for what, took in samples.items()
        if took
    ]
    finish(options, conditions, _COLUMNS, rows, samples)
    print(
        f"seed {seed}: {len(ours)} losses, {dict(Counter(how for how, _ in ours))}: the same bits"
    )


if __name__ == "__main__":
    main()
