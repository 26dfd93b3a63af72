"""What a rank does that joins others with a sharded model, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import runtime
from echelon.dist.fsdp import fully_shard, gradient_sync, set_requires_gradient_sync
from echelon.dist.fsdp.moving import move
from echelon.dist.fsdp.states import shards
from echelon.dist.resilient.handover import receive_state, send_state
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.parcel import Parcel
from echelon.dist.resilient.sharded import ShardedState
from echelon.dist.resilient.training.sharded import ShardedTraining
from echelon.errors import CollectiveError
from echelon.recorder.continuation import Epoch
from tests.dist.resilient.test_handover import _Group


@pytest.fixture(autouse=True)
def world():
    yield dist.init()
    dist.shutdown()


def _made(*, is_whole=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    if not is_whole:
        fully_shard(model[0])
    fully_shard(model, ignored_params=[model[2].bias])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = ShardedState(model, optimizer)
    state.enter(dist.world(), 0)
    state.keep(4)
    return model, optimizer, state


def _handed_over(state, other) -> None:
    group = _Group()
    send_state(group, 0, state.contents)
    other.fill(receive_state(group, 0), 4)


def test_a_process_that_has_not_joined_divides_a_model_without_the_others():
    """It has its part of each parameter, whose values come later; a forward is refused."""
    absent = runtime._need().maker.make_absent(range(2), "world", 20.0)
    model = nn.Linear(64, 64)
    fully_shard(model, group=absent, reshard_after_forward=1)
    found = shards(model)
    assert {one.ranks for one in found.values()} == {(0, 1)}
    assert 0 < sum(one.length for one in found.values()) < 64 * 65
    with pytest.raises(CollectiveError, match="has yet to join the other ranks"):
        model(torch.ones(1, 64))
    move(model, dist.world())
    assert sum(one.length for one in shards(model).values()) == 64 * 65


def test_what_is_not_sharded_arrives_and_what_is_trained():
    model, optimizer, state = _made()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[1].running_mean.fill_(3.0)
    with torch.no_grad():
        model[2].bias.fill_(2.0)
    optimizer.param_groups[0]["lr"] = 0.5
    state.keep(5)
    drawn = torch.rand(3)
    other, its_optimizer, its_state = _made(seed=1)
    _handed_over(state, its_state)
    assert torch.equal(torch.rand(3), drawn)
    assert [one.requires_grad for one in other.parameters()] == [False, *[True] * 5]
    assert [one.training for one in other] == [True, False, True]
    assert other[1].running_mean.tolist() == [3.0] * 4
    assert other[2].bias.tolist() == [2.0] * 2
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    assert its_state.offers([0])["steps"] == [4]
    assert its_state.joined_parts().keys() == state.joined_parts().keys()


def test_a_model_that_is_divided_differently_does_not_join():
    (_, _, state), (_, _, other) = _made(), _made(is_whole=False)
    with pytest.raises(ValueError, match="the model is sharded differently"):
        _handed_over(state, other)


def _training(state, total=9):
    return ShardedTraining(
        lambda _: print, state, 0, total, None, Joins(is_on=True), None, is_protected=True
    )


def test_a_rank_with_another_total_does_not_join(monkeypatch):
    (_, _, state), (_, _, other) = _made(), _made(seed=1)
    told = Parcel.of(_training(state, total=9)._contents())
    training = _training(other, total=8)
    monkeypatch.setattr(
        "echelon.dist.resilient.training.copied.receive_state", lambda *_: told.contents()
    )
    with pytest.raises(ValueError, match="total must be equal on all ranks, but is 8 on this rank"):
        training._hand_over_rest(dist.world(), 1, [0])


def test_a_rank_that_began_to_join_offers_what_it_has():
    """The others may have released the copies of the world before, and need those."""
    _, _, state = _made()
    training = _training(state)
    training._is_newcomer = True
    row = training._row(Epoch(number=1, roster=(0,), lost=()))
    assert row["joins"]
    assert row["offers"] == [(0, 4, 0)]
    new = {"begun": -1, "offers": [], "sets": [], "steps": [], "joins": True}
    training._agree(Epoch(number=1, roster=(0, 1), lost=()), [row, new])
    assert training._places([row, new]) == (0, [1]), "only the other one needs the rest"


@pytest.mark.parametrize("is_inside", [False, True], ids=["between steps", "in a forward"])
def test_a_sharded_parameter_trains_again_as_when_it_was_kept(is_inside):
    """Also one that the step froze while the whole parameter was there, before it failed."""
    model, _, state = _made()
    shard = model[0].weight
    if is_inside:

        def freeze(*_):
            model[0].weight.requires_grad_(False)
            raise CollectiveError("torn")

        hook = model[2].register_forward_pre_hook(freeze)
        with pytest.raises(CollectiveError, match="torn"):
            model(torch.rand(2, 3))
        hook.remove()
    else:
        shard.requires_grad_(False)
    state.restore_rest(4)
    move(model, dist.world())
    assert model[0].weight is shard
    assert shard.requires_grad
    model(torch.rand(2, 3)).sum().backward()
    assert shard.grad is not None


@pytest.mark.parametrize("is_synced", [True, False])
def test_gradients_that_prepare_left_behind_are_dropped(is_synced):
    model, _, state = _made()
    with gradient_sync(model, enabled=is_synced):
        model(torch.rand(2, 3)).sum().backward()
    state.restore()
    assert all(one.grad is None for one in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    found = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    model[1].reset_running_stats()
    model(torch.ones(2, 3)).sum().backward()
    assert all(map(torch.equal, found, (one.grad for one in model.parameters())))


def test_a_lost_step_leaves_gradients_synced_as_at_its_start():
    """A step that turned it off for its first micro-batches had not turned it on again."""
    model, _, state = _made()
    set_requires_gradient_sync(model, False)
    assert state.contents()["syncs"] == [True]
    state.restore_rest(4)
    move(model, dist.world())
    assert [unit.entry.sync for unit in state._units()] == [True]


def test_a_joining_rank_is_synced_as_the_others_were_at_the_step():
    model, _, state = _made()
    other_model, _, other = _made(seed=1)
    set_requires_gradient_sync(model, False)
    state.keep(5)
    set_requires_gradient_sync(model, True)
    _handed_over(state, other)
    assert [unit.entry.sync for unit in other._units()] == [False]
    set_requires_gradient_sync(other_model, True)
    other.restore_rest(4)
    assert [unit.entry.sync for unit in other._units()] == [False]
