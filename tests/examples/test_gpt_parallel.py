"""Shards in the training loop: in a world of one, where they must do what replicas do."""

from __future__ import annotations

import pytest
import torch
from gpt.training.loop import Trainer, TrainingSettings

import echelon.dist as dist
from echelon.dist.checkpoint import save


@pytest.fixture
def make(corpus, tiny_config):
    world = dist.init()
    made = []

    def build(**changes):
        options = {"steps": 20, "batch": 4, "lr": 3e-3, "warmup": 3, "clip": 0.5, "seed": 0}
        settings = TrainingSettings(**{**options, **changes})
        made.append(Trainer.build(tiny_config, settings, corpus, world=world))
        return made[-1]

    yield build
    for trainer in made:
        trainer.source.close()
    dist.shutdown()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_shards_train_as_replicas_do(make, optimizer):
    """Clipping at work: the gradients' norm is above the limit in these steps."""
    replicas, shards = make(optimizer=optimizer), make(optimizer=optimizer, shard=True)
    ours = [shards.train_step() for _ in range(5)]
    assert ours == pytest.approx([replicas.train_step() for _ in range(5)], abs=1e-6)
    whole = dict(shards.parallel.whole().named_parameters())
    for name, parameter in replicas.model.named_parameters():
        torch.testing.assert_close(whole[name], parameter, rtol=1e-4, atol=1e-6)
    assert shards.model.flops_per_token() == replicas.model.flops_per_token()


@pytest.mark.parametrize("shard", [True, False])
def test_a_loss_in_chunks_and_an_average_of_the_weights_change_no_step(make, shard):
    plain, other = make(shard=shard), make(shard=shard, chunked_loss=True, ema=0.9, accumulate=2)
    ours = [other.train_step() for _ in range(4)]
    assert ours == pytest.approx([plain.train_step() for _ in range(4)], abs=1e-5)
    average = dict(other.whole().named_parameters())
    differences = [
        (average[name] - parameter).abs().max().item()
        for name, parameter in plain.whole().named_parameters()
    ]
    assert max(differences) > 1e-4  # the run is judged by the average


def test_warming_up_changes_nothing_of_shards_either(make):
    cold, warm = make(shard=True), make(shard=True)
    warm.warm_up()
    assert [warm.train_step() for _ in range(3)] == [cold.train_step() for _ in range(3)]


def test_matrices_are_decayed_when_sharded_too(make):
    groups = make(shard=True).optimizer.param_groups
    plain = make().optimizer.param_groups
    assert [len(group["params"]) for group in groups] == [len(group["params"]) for group in plain]


def test_sharded_bf16_computes_in_bf16_and_keeps_float32_weights(make):
    full, half = make(shard=True), make(shard=True, bf16=True)
    losses = full.train_step(), half.train_step()
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    state = half.optimizer.state.values()
    assert {entry["exp_avg"].dtype for entry in state} == {torch.float32}


def _at_scale(trainer, scale):
    trainer.scaler.load_state_dict({"scale": scale, "num_finite": 0})
    return trainer


@pytest.mark.parametrize("shard", [True, False])
def test_fp16_skips_overflowing_steps_and_then_trains_as_float32_does(make, tmp_path, shard):
    full, half = make(shard=shard), _at_scale(make(shard=shard, fp16=True), 2.0**40)
    before = [p.detach().clone() for p in half.model.parameters()]
    half.train_step()  # overflows at that scale
    assert half.scaler.get_scale() == 2.0**39
    after = half.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    half = _at_scale(make(shard=shard, fp16=True), 2.0**10)
    losses = [[trainer.train_step() for _ in range(4)] for trainer in (full, half)]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert losses[0] != losses[1]
    assert half.scaler.get_scale() == 2.0**10
    save(tmp_path / "saved", half.state())
    resumed = make(shard=shard, fp16=True)
    resumed.resume(tmp_path / "saved")
    assert resumed.scaler.state_dict() == {"scale": 2.0**10, "num_finite": 4}
