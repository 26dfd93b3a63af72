"""Ranks of a pipeline that are killed at named moments: its stages outlive them."""

from __future__ import annotations

import signal

import pytest

from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.pipelines import SAVED_STEP, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a run on one rank, which none of this concerns."""
    ((found, *_),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _survive(folder, world_size, kills, kind="pipeline", hosts=()):
    """Run, and return what each rank that is left reports, and the agent."""
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, agent = run_watched(
        train, world_size, folder, _TOTAL, kills, kind, hosts, exit_codes=codes
    )
    assert len(ends) == world_size - len(codes)
    for _, worlds, _, _ in ends:
        assert worlds[-1][1] == tuple(sorted(codes))
    return ends, agent


def _check(ends, undisturbed):
    """Each rank that is left has the bits, and has committed each step once.

    In each world, the optimizer waited for the thread that copies its state: none was warned of.
    """
    for bits, _, commits, warned in ends:
        assert bits == undisturbed
        assert not [one for one in warned if "while it was being copied" in one]
        assert [step for step, _ in commits] == list(range(_TOTAL))


def test_a_rank_may_die_at_any_moment_of_the_passes(tmp_path, undisturbed):
    """Four stages on four ranks, three on three, four on two in a V, two on the last one."""
    kills = [(1, "forward", 1), (3, "between micro-batches", 3), (0, "backward", 5)]
    ends, agent = _survive(tmp_path, 4, kills, "pipeline, promptly copied")
    _check(ends, undisturbed)
    assert [size for _, _, size in ends[0][1]] == [4, 3, 2, 1]
    assert [one["lost_ranks"] for one in agent.report.continuations] == [[1], [1, 3], [0, 1, 3]]
    assert [one["step"] for one in agent.report.continuations] == [1, 3, 5]


def test_a_rank_may_die_around_the_optimizer(tmp_path, undisturbed):
    kills = [
        (4, "before the optimizer", 1), (1, "after the optimizer", 3), (0, "end of the step", 5),
    ]  # fmt: skip
    ends, _ = _survive(tmp_path, 6, kills, "replicas")
    _check(ends, undisturbed)


def test_a_rank_may_die_in_any_phase_of_copying(tmp_path, undisturbed):
    """A copy that is not complete is not used; the one before is."""
    kills = [
        (4, "before a copy", 1), (1, "in a copy", 3), (0, "before a copy's stamp", 4),
        (2, "after a copy's stamp", 6),
    ]  # fmt: skip
    ends, _ = _survive(tmp_path, 5, kills)
    _check(ends, undisturbed)


@pytest.mark.parametrize(
    "kills",
    [[(0, "forward", 2), (5, "backward", 2)], [(2, "forward", 2), (3, "forward", 2)]],
    ids=["of the first and the last stage", "all replicas of a stage"],
)
def test_two_may_die_at_once(tmp_path, undisturbed, kills):
    """Six ranks have two replicas of three stages, and four have two of four."""
    ends, _ = _survive(tmp_path, 6, kills, "replicas")
    _check(ends, undisturbed)


def test_the_rank_of_the_first_and_the_last_stage_may_die(tmp_path, undisturbed):
    """It has the losses, too; of two ranks, the other one is left alone."""
    ends, _ = _survive(tmp_path, 2, [(0, "between micro-batches", 4)])
    _check(ends, undisturbed)


@pytest.mark.parametrize(
    "moments",
    [
        ("leaving", "before the meeting", "in the meeting"),
        ("regrouping", "before build", "after build"),
        ("restoring shards", "before new copies", "in a copy"),
        ("after a copy's stamp", "compared", "after new copies"),
    ],
    ids=["before an agreement", "while stages are built", "while they are filled", "after that"],
)
def test_ranks_may_die_while_another_loss_is_recovered_from(tmp_path, undisturbed, moments):
    """The copies of the world before are kept until all of the new one are complete."""
    kills = [(0, "forward", 2), *((rank + 1, one, 2) for rank, one in enumerate(moments))]
    ends, _ = _survive(tmp_path, 6, kills, "replicas")
    assert len(ends) == 2
    _check(ends, undisturbed)


def test_ranks_of_sharded_stages_may_die(tmp_path, undisturbed):
    """Two stages in two shards each, one in three, two whole ones, and all on one rank."""
    kills = [
        (2, "forward", 1), (0, "after the optimizer", 3), (1, "backward", 5),
    ]  # fmt: skip
    ends, _ = _survive(tmp_path, 4, kills, "shards")
    _check(ends, undisturbed)


def test_a_step_whose_start_was_not_copied_is_repeated_with_the_one_before(tmp_path, undisturbed):
    kind = "pipeline, slowly copied"
    ends, agent = _survive(tmp_path, 4, [(2, "forward", 4)], kind)
    _check(ends, undisturbed)
    (loss,) = agent.report.continuations
    assert (loss["step"], loss["repeated"], loss["steps_lost"]) == (3, True, 1)


_BEFORE = -1  # the first step


def test_a_rank_may_die_before_it_begins_the_first_step(tmp_path, undisturbed):
    """Its copies of the start are complete then."""
    ends, agent = _survive(tmp_path, 3, [(1, "compared", _BEFORE)])
    _check(ends, undisturbed)
    (loss,) = agent.report.continuations
    assert loss["step"] == 0


# ---- several hosts, which are believed in ----

# Of three hosts with a rank each: the owner of a stage, and the rank that has its only other copy.
_OWNER_AND_PARTNER = [(0, "forward", 5), (1, "forward", 5), (1, "before the meeting", 5)]


def test_a_whole_host_may_die_and_then_a_rank_of_the_other_one(tmp_path, undisturbed):
    kills = [(2, "forward", 2), (3, "forward", 2), (0, "backward", 5)]
    ends, _ = _survive(tmp_path, 4, kills, "pipeline", (0, 0, 1, 1))
    _check(ends, undisturbed)


def test_a_host_may_die_whose_stages_have_replicas_on_another_one(tmp_path, undisturbed):
    """No copies are sent then."""
    kills = [(1, "forward", 4), (3, "forward", 4)]
    ends, _ = _survive(tmp_path, 4, kills, "replicas", (0, 1, 0, 1))
    _check(ends, undisturbed)


def test_if_both_copies_of_a_stage_are_lost_the_checkpoint_is_loaded(tmp_path, undisturbed):
    """The newest copies are those of the start of step 4: rank 0 dies before it has copied 5."""
    kills, kind = (
        [(0, "forward", 5), (1, "before the meeting", 5)],
        "pipeline, saved, slowly copied",
    )
    ends, agent = _survive(tmp_path, 3, kills, kind, (0, 1, 2))
    ((bits, _, commits, warned),) = ends
    assert bits == undisturbed
    assert [step for step, _ in commits] == [*range(4), *range(SAVED_STEP, _TOTAL)]
    text = f"going back to the checkpoint of step {SAVED_STEP}"
    assert f"all copies of the state of rank 0 are lost (step 4): {text}" in warned
    last = agent.report.continuations[-1]
    assert (last["step"], last["repeated"], last["steps_lost"]) == (SAVED_STEP, True, 2)


def test_a_rank_may_die_while_the_checkpoint_is_loaded(tmp_path, undisturbed):
    kills = [(1, "forward", 5), (2, "forward", 5), (2, "before the meeting", 5), (3, "loading", 5)]
    ends, _ = _survive(tmp_path, 4, kills, "pipeline, saved", (0, 1, 2, 3))
    ((bits, _, _, _),) = ends
    assert bits == undisturbed


def test_if_there_is_no_checkpoint_either_the_error_names_whose_stages_are_lost(tmp_path):
    codes = {rank: -signal.SIGKILL for rank, _, _ in _OWNER_AND_PARTNER}
    ends, _ = run_watched(
        train, 3, tmp_path, _TOTAL, _OWNER_AND_PARTNER, "pipeline", (0, 1, 2), exit_codes=codes
    )
    ((error, *_),) = ends
    assert error.startswith("PeerLostError"), error
    assert "all copies of the state of rank 0 are lost" in error
    assert "there is no from_checkpoint=" in error
