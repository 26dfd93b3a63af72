"""Ranks of a sharded model that are killed at named moments: their shards outlive them."""

from __future__ import annotations

import signal

import pytest

from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import train
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a replicated run on one rank, which none of this concerns."""
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _survive(tmp_path, world_size, kills):
    """Run, and return what each rank that is left reports."""
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, _ = run_watched(train, world_size, tmp_path, _TOTAL, kills, "sharded", exit_codes=codes)
    assert len(ends) == world_size - len(codes)
    for _, worlds, commits in ends:
        assert worlds[-1][1] == tuple(sorted(codes))
        assert [step for step, _ in commits] == list(range(_TOTAL))
    return ends


def test_a_rank_may_die_at_any_moment_of_a_step(tmp_path, undisturbed):
    kills = [(0, "forward", 2), (2, "collective", 4), (3, "after the optimizer", 6)]
    ends = _survive(tmp_path, 4, kills)
    assert [end[0] for end in ends] == [undisturbed]


def test_a_rank_may_die_in_any_phase_of_copying(tmp_path, undisturbed):
    """A copy that is not complete is not used; the one before is."""
    kills = [
        (4, "before a copy", 1), (1, "in a copy", 3), (0, "before a copy's stamp", 5),
        (2, "after a copy's stamp", 7),
    ]  # fmt: skip
    ends = _survive(tmp_path, 5, kills)
    assert [end[0] for end in ends] == [undisturbed]


def test_ranks_may_die_before_the_copies_of_the_next_world_exist(tmp_path, undisturbed):
    """Until then the copies of the earlier world are kept, also those of the ranks it lost."""
    kills = [
        (0, "forward", 2), (1, "restoring shards", 2), (2, "before new copies", 2),
        (3, "forward", 6), (4, "after new copies", 6),
    ]  # fmt: skip
    ends = _survive(tmp_path, 6, kills)
    assert [end[0] for end in ends] == [undisturbed]
