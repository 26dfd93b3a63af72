"""Ranks of a sharded model that are killed, and whose places other processes take."""

from __future__ import annotations

import pytest

from tests.dist.resilient.agent import run_replaced
from tests.dist.resilient.training import (
    CHANGES_AT,
    FULL_FROM,
    SAVED_STEP,
    Kill,
    train_replaced,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 16
_UNTIL_FULL = FULL_FROM  # the step that the first rank to join has not trained


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a replicated run on one rank, which none of this concerns."""
    folder = tmp_path_factory.mktemp("whole")
    ((found, *_),) = run_ranks(train_replaced, 1, folder, _TOTAL, "", [], {0: []})
    return found


def _run(folder, size, lives: dict[int, list[list[Kill]]], layout="sharded", hosts=()):
    """Run, check the end of each rank, and return their bits, their commits and all joins."""
    ends, agent = run_replaced(
        train_replaced, size, folder, _TOTAL, layout, list(hosts), lives=lives, whole=[]
    )
    for _, worlds, _, changed in ends:
        assert worlds[-1][1:] == ((), size)
        assert changed == (False, False), "what step 2 has changed"
    commits = [[step for step, _ in commits] for _, _, commits, _ in ends]
    return {bits for bits, *_ in ends}, commits, agent.report.continuations


def _replace(folder, size, lives):
    bits, commits, continuations = _run(folder, size, lives)
    for steps in commits:
        assert steps == list(range(steps[0], _TOTAL))
    return bits, commits, continuations


def test_a_killed_rank_is_replaced_and_the_bits_are_those_of_an_undisturbed_run(
    tmp_path, undisturbed
):
    lives = {2: [[(2, "forward", CHANGES_AT + 1)], []]}
    bits, commits, (loss, join) = _replace(tmp_path, 4, lives)
    assert bits == {undisturbed}
    joined_at = _UNTIL_FULL + 1
    assert [steps[0] for steps in commits] == [0, 0, joined_at, 0]
    assert (loss["lost_ranks"], loss["joined_ranks"], loss["num_ranks"]) == ([2], [], 3)
    assert (join["lost_ranks"], join["joined_ranks"], join["num_ranks"]) == ([], [2], 4)
    assert (join["step"], join["repeated"], join["steps_lost"]) == (joined_at, False, 0)


@pytest.mark.slow
def test_a_rank_joins_others_that_keep_parameters_among_neighbors(tmp_path, undisturbed):
    """Two neighbors, of four ranks; none of three, meanwhile."""
    ends, _ = run_replaced(
        train_replaced, 4, tmp_path, _TOTAL, "near", [],
        lives={2: [[(2, "forward", CHANGES_AT + 1)], []]}, whole=[],
    )  # fmt: skip
    assert {bits for bits, *_ in ends} == {undisturbed}


_JOINING = -1  # the step of a process that has not joined yet


def _lives(rank: int, *moments: str) -> list[list[Kill]]:
    """Return what ends each process of a rank that is lost early: all but the last."""
    joining = [[(rank, moment, _JOINING)] for moment in moments]
    return [[(rank, "forward", CHANGES_AT + 1)], *joining, []]


@pytest.mark.parametrize(
    "moments",
    [
        ["filled", "compared"],
        pytest.param(["in the meeting", "restoring shards"], marks=pytest.mark.slow),
        pytest.param(["in a copy", "after new copies"], marks=pytest.mark.slow),
        pytest.param(["before the meeting", "receiving", "prepare"], marks=pytest.mark.slow),
        pytest.param(
            ["before new copies", "before a copy", "after a copy's stamp"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_process_that_joins_may_die_at_any_moment(tmp_path, undisturbed, moments):
    """Each time the others go on, and another one joins."""
    bits, commits, _ = _replace(tmp_path, 3, {1: _lives(1, *moments)})
    assert bits == {undisturbed}
    assert [steps[0] for steps in commits[::2]] == [0, 0]
    assert commits[1][0] > _UNTIL_FULL


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sending", "before a copy's stamp"),
        pytest.param("compared", "restoring shards", marks=pytest.mark.slow),
        pytest.param("in the meeting", "before new copies", marks=pytest.mark.slow),
        pytest.param("before the meeting", "after new copies", marks=pytest.mark.slow),
        pytest.param("prepare", "before a copy", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_have_the_state_may_die_while_others_join(tmp_path, undisturbed, first, second):
    """The lowest rank, which hands the state over, and then another one."""
    lives = {
        1: _lives(1),
        0: [[(0, first, FULL_FROM)], []],
        3: [[(3, second, FULL_FROM + 1)], []],
    }
    bits, _, _ = _replace(tmp_path, 4, lives)
    assert bits == {undisturbed}


@pytest.mark.slow
def test_the_only_rank_that_is_left_hands_the_state_over(tmp_path, undisturbed):
    """Two processes join it, of which one dies meanwhile; then it dies itself."""
    lives = {
        0: _lives(0, "restoring shards"),
        1: [[(1, "forward", FULL_FROM + 4)], []],
        2: _lives(2),
    }
    bits, _, _ = _replace(tmp_path, 3, lives)
    assert bits == {undisturbed}


@pytest.mark.slow
def test_ranks_on_several_hosts_send_the_copies_to_one_that_joins(tmp_path, undisturbed):
    """And the rank that hands the rest over may die, on a host of its own."""
    lives = {1: _lives(1, "restoring shards"), 0: [[(0, "compared", FULL_FROM + 1)], []]}
    bits, _, _ = _run(tmp_path, 4, lives, hosts=[0, 1, 1, 2])
    assert bits == {undisturbed}


@pytest.mark.slow
def test_a_rank_joins_while_the_others_lose_all_copies_of_a_shard(tmp_path, undisturbed):
    """It goes back to the checkpoint with the only other rank that is left."""
    lives = {
        1: _lives(1),
        0: [[(0, "restoring shards", FULL_FROM)], []],
        2: [[(2, "restoring shards", FULL_FROM)], []],
    }
    bits, commits, _ = _run(tmp_path, 4, lives, "sharded and saved", hosts=range(4))
    assert bits == {undisturbed}
    assert commits[1][0] == commits[3][FULL_FROM] == SAVED_STEP
