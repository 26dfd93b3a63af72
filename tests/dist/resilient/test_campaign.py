"""Ranks that are killed at random moments, in many trainings. Slow; prints what recovery took.

ECHELON_TRAININGS=50 python -m pytest -m slow -s tests/dist/resilient/test_campaign.py
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics

import pytest

from tests.dist.resilient import pipelines, training
from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import Kill
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

_TOTAL = 40
_SIZE = 5
_EVEN_SIZE = 6  # of which two replicas can be formed
_NUM_TRAININGS = int(os.environ.get("ECHELON_TRAININGS", "10"))
_LONGEST_US = 60_000  # a step and a recovery, on a machine that is not busy


def _kills(seed: int, size: int) -> list[Kill]:
    """Some of the ranks, each at a moment of its own; some of them close together."""
    draw = random.Random(seed)
    ranks = draw.sample(range(size), draw.randint(1, size - 1))
    found: list[Kill] = []
    step = draw.randint(0, _TOTAL // 4)
    for rank in ranks:
        if draw.random() < 0.5:
            step = draw.randint(0, _TOTAL // 2)
        found.append((rank, f"{draw.randint(0, _LONGEST_US)} us", step))
    return found


@pytest.mark.parametrize(
    ("train", "layout", "size"),
    [
        (training.train, "", _SIZE),
        (training.train, "sharded", _SIZE),
        (training.train, "hsdp", _EVEN_SIZE),
        (pipelines.train, "pipeline", _SIZE),
        (pipelines.train, "replicas", _EVEN_SIZE),
        (pipelines.train, "shards", _EVEN_SIZE),
    ],
    ids=["replicated", "sharded", "hsdp", "pipeline", "pipeline, replicas", "pipeline, shards"],
)
def test_the_bits_are_those_of_an_undisturbed_run_whenever_ranks_are_killed(
    tmp_path, train, layout, size
):
    alone = [layout] if train is pipelines.train else []
    ((undisturbed, *_),) = run_ranks(train, 1, tmp_path, _TOTAL, [], *alone)
    num_kills, took = 0, []
    for seed in range(_NUM_TRAININGS):
        kills, folder = _kills(seed, size), tmp_path / f"seed_{seed}"
        folder.mkdir()
        codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
        ends, _ = run_watched(train, size, folder, _TOTAL, kills, layout, exit_codes=codes)
        assert [end[0] for end in ends] == [undisturbed] * (size - len(kills)), f"seed {seed}"
        num_kills += len(kills)
        died = [float((folder / f"{rank}.died").read_text()) for rank, _, _ in kills]
        took += _times([commits for _, _, commits, *_ in ends], died)
    print(
        f"\n{num_kills} kills in {_NUM_TRAININGS} trainings; kill to the next committed step, less "
        f"a step: median {statistics.median(took):.3f} s, largest {max(took):.3f} s"
    )


def _times(commits: list[list[tuple[int, float]]], died: list[float]) -> list[float]:
    """Return, for each kill, the time until all survivors had committed a step, less a step."""
    found = []
    for moment in died:
        after = [next(at for _, at in one if at > moment) for one in commits]
        steps = [b[1] - a[1] for one in commits for a, b in itertools.pairwise(one)]
        found.append(max(0.0, max(after) - moment - statistics.median(steps)))
    return found
