"""Ranks of a pipeline that are killed, and whose places other processes take."""

from __future__ import annotations

import pytest

from tests.dist.resilient.agent import run_replaced
from tests.dist.resilient.pipelines import FROZEN_STEP, SAVED_STEP, train_replaced
from tests.dist.resilient.training import FULL_FROM, Kill
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 14
_JOINING = -1  # the step of a process that has not joined yet


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a run on one rank, which none of this concerns."""
    folder = tmp_path_factory.mktemp("whole")
    ((found, *_),) = run_ranks(train_replaced, 1, folder, _TOTAL, "pipeline", (), {0: []})
    return found


def _run(folder, size, lives: dict[int, list[list[Kill]]], kind="pipeline", hosts=()):
    """Run, check the end of each rank, and return their bits, their commits and all joins."""
    ends, agent = run_replaced(
        train_replaced, size, folder, _TOTAL, kind, tuple(hosts), lives=lives, whole=[]
    )
    for _, worlds, _ in ends:
        assert worlds[-1][1:] == ((), size)
    commits = [[step for step, _ in one] for *_, one in ends]
    return {bits for bits, *_ in ends}, commits, agent.report.continuations


def _lives(rank: int, *moments: str) -> list[list[Kill]]:
    """Return what ends each process of a rank that is lost early: all but the last."""
    joining = [[(rank, moment, _JOINING)] for moment in moments]
    return [[(rank, "forward", FROZEN_STEP + 1)], *joining, []]


@pytest.mark.parametrize("kind", ["pipeline", "replicas", "shards"])
def test_a_killed_rank_is_replaced_and_the_bits_are_those_of_an_undisturbed_run(
    tmp_path, undisturbed, kind
):
    """It learns what a step froze, and is given stages that no rank had alone before."""
    bits, commits, (loss, join) = _run(tmp_path, 4, {2: _lives(2)}, kind)
    assert bits == {undisturbed}
    joined_at = FULL_FROM + 1
    assert [steps[0] for steps in commits] == [0, 0, joined_at, 0]
    for steps in commits:
        assert steps == list(range(steps[0], _TOTAL))
    assert (loss["lost_ranks"], loss["joined_ranks"], loss["num_ranks"]) == ([2], [], 3)
    assert (join["lost_ranks"], join["joined_ranks"], join["num_ranks"]) == ([], [2], 4)
    assert (join["step"], join["repeated"], join["steps_lost"]) == (joined_at, False, 0)


@pytest.mark.parametrize(
    "moments",
    [
        ["filled", "after build"],
        pytest.param(["in the meeting", "before build"], marks=pytest.mark.slow),
        pytest.param(["restoring shards", "after new copies"], marks=pytest.mark.slow),
        pytest.param(["before the meeting", "receiving", "in a copy"], marks=pytest.mark.slow),
        pytest.param(
            ["before new copies", "compared", "after a copy's stamp"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_process_that_joins_may_die_at_any_moment(tmp_path, undisturbed, moments):
    """Each time the others continue, and another one joins."""
    bits, commits, _ = _run(tmp_path, 3, {1: _lives(1, *moments)})
    assert bits == {undisturbed}
    assert [steps[0] for steps in commits[::2]] == [0, 0]
    assert commits[1][0] > FULL_FROM


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sending", "before a copy's stamp"),
        pytest.param("before build", "restoring shards", marks=pytest.mark.slow),
        pytest.param("in the meeting", "before new copies", marks=pytest.mark.slow),
        pytest.param("after build", "after new copies", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_have_the_state_may_die_while_others_join(tmp_path, undisturbed, first, second):
    """The lowest rank, which hands over what is not copied, and then another one."""
    lives = {
        1: _lives(1),
        0: [[(0, first, FULL_FROM)], []],
        3: [[(3, second, FULL_FROM + 1)], []],
    }
    bits, _, _ = _run(tmp_path, 4, lives, "replicas")
    assert bits == {undisturbed}


@pytest.mark.slow
def test_the_only_rank_that_is_left_lets_others_join(tmp_path, undisturbed):
    """Two processes join it, of which one dies meanwhile; then it dies itself."""
    lives = {
        0: _lives(0, "restoring shards"),
        1: [[(1, "forward", FULL_FROM + 4)], []],
        2: _lives(2),
    }
    bits, _, _ = _run(tmp_path, 3, lives)
    assert bits == {undisturbed}


@pytest.mark.slow
def test_ranks_on_several_hosts_send_the_copies_to_one_that_joins(tmp_path, undisturbed):
    """And the rank that hands the rest over may die, on a host of its own."""
    lives = {1: _lives(1, "restoring shards"), 0: [[(0, "compared", FULL_FROM + 1)], []]}
    bits, _, _ = _run(tmp_path, 4, lives, "replicas", hosts=[0, 1, 1, 2])
    assert bits == {undisturbed}


@pytest.mark.slow
def test_a_rank_joins_while_the_others_lose_all_copies_of_a_stage(tmp_path, undisturbed):
    """It goes back to the checkpoint with the only other rank that is left."""
    lives = {
        1: _lives(1),
        0: [[(0, "restoring shards", FULL_FROM)], []],
        2: [[(2, "restoring shards", FULL_FROM)], []],
    }
    bits, commits, _ = _run(tmp_path, 4, lives, "pipeline, saved", hosts=range(4))
    assert bits == {undisturbed}
    assert commits[1][0] == commits[3][FULL_FROM] == SAVED_STEP
