"""Ranks of a sharded model that are killed at named moments: their shards outlive them."""

from __future__ import annotations

import signal
import warnings

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient, runtime
from echelon.dist.fsdp import fully_shard
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.sharded import ShardedState
from echelon.dist.resilient.training.sharded import ShardedTraining
from echelon.errors import CollectiveError
from echelon.recorder.continuation import Epoch
from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a replicated run on one rank, which none of this concerns."""
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _survive(tmp_path, world_size, kills, layout="sharded"):
    """Run, and return what each rank that is left reports."""
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, _ = run_watched(train, world_size, tmp_path, _TOTAL, kills, layout, exit_codes=codes)
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


def test_a_number_of_neighbors_that_fits_fewer_ranks_no_longer_is_survived(tmp_path, undisturbed):
    ends = _survive(tmp_path, 4, [(1, "forward", 2)], "near")
    assert [end[0] for end in ends] == [undisturbed] * 3


def test_a_number_of_neighbors_that_does_not_fit_is_named_once(training):
    state = training._state
    (unit,) = units_of(state._model)
    unit.near_size = 2
    text = r"does not evenly divide the 1 ranks that now share the parameters: using True"
    with pytest.warns(RuntimeWarning, match=text):
        state.restart(dist.world())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.restart(dist.world())


def _drift(rank, world_size):
    dist.init("shm", timeout_s=60)
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def train_step(step):
        seen.append(step)
        model(torch.full((2, 4), float(rank)) + torch.eye(4)[:2]).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"buffer '1\.running_mean' differs"):
        resilient.run(lambda _: train_step, model, optimizer, total=5)
    dist.shutdown()
    return seen


def test_a_buffer_that_a_step_lets_drift_is_named_after_the_first_step():
    """A loss would be too late: the lost rank's statistics could not be restored."""
    assert run_ranks(_drift, 2, environ={"ECHELON_ON_LOSS": "shrink"}) == [[0], [0]]


@pytest.fixture
def training():
    """A training of nine steps on one rank, in which step 2 fails."""

    def fail(step):
        if step == 2:
            raise CollectiveError("torn")

    dist.init()
    try:
        model = fully_shard(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = ShardedState(model, optimizer)
        joins = Joins(is_on=False)
        yield ShardedTraining(lambda _: fail, state, 0, 9, None, joins, None, is_protected=False)
        state.drop()
    finally:
        dist.shutdown()


def test_after_a_loss_the_thread_that_copies_ends_before_the_ranks_meet(training, monkeypatch):
    """It may be waiting for a partner, so its groups are left first."""
    seen = []

    def meet(*_):
        seen.append("met")
        raise CollectiveError("nothing")

    monkeypatch.setattr(runtime, "leave_groups", lambda: seen.append("left"))
    monkeypatch.setattr(training._state, "stop", lambda _: seen.append("stopped"))
    monkeypatch.setattr(training, "_next_epoch", meet)
    with pytest.raises(CollectiveError, match="nothing"):
        training._recover(CollectiveError("torn"))
    assert seen == ["left", "stopped", "met"]


def test_a_finished_step_that_is_computed_again_is_counted(training):
    epoch = Epoch(number=1, roster=(0, 1), lost=(2,))
    with pytest.raises(CollectiveError, match="torn"):
        training.train(resilient.World(dist.world(), 0, ()))
    assert training._row(epoch)["begun"] == 3, "steps 0, 1 and 2"
    sets = [(0, [[0], [1], [2]])]
    both = [(0, step, owner) for owner in (0, 2) for step in (5, 6)]
    rows = [
        {"begun": 7, "offers": both, "sets": sets},
        {"begun": 6, "offers": [(0, 5, 1)], "sets": sets},
    ]
    assert training._agree(epoch, rows) == (5, 2), "step 5, which was finished, and step 6"
    rows[0]["begun"] = 6
    assert training._agree(epoch, rows) == (5, 1)
    rows[1]["offers"] = [(0, 6, 1)]
    assert training._agree(epoch, rows) == (6, 0)
