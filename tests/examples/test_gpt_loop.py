"""Training in a world of one: it learns, and it goes on exactly where it was stopped."""

from __future__ import annotations

import pytest
import torch
from gpt.model.sample import generate, printable
from gpt.text.data import validation_windows
from gpt.text.vocabulary import BYTES

from echelon.dist.checkpoint import save
from echelon.errors import NonFiniteGradientError


def train(trainer, num_steps: int) -> list[float]:
    return [trainer.train_step() for _ in range(num_steps)]


def same_weights(one, other) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_training_learns(make_trainer, corpus):
    trainer = make_trainer(steps=60)
    windows = validation_windows(corpus.validation, num_windows=8, context=16)
    before = trainer.validate(windows)
    train(trainer, 60)
    assert trainer.validate(windows) < before - 1.0


def test_the_loss_is_the_mean_over_the_global_batch(make_trainer):
    trainer = make_trainer()
    batch = make_trainer().fetch_batch()
    expected = torch.nn.functional.cross_entropy(
        trainer.model(batch.tokens).flatten(0, 1), batch.targets.flatten()
    ).item()
    assert trainer.train_step() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_passes", [2, 3, 4])
def test_accumulated_passes_make_the_same_step(make_trainer, num_passes):
    whole, parts = make_trainer(), make_trainer(accumulate=num_passes)
    assert train(parts, 4) == pytest.approx(train(whole, 4), abs=1e-6)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("full", 2), ("selective", 1)])
def test_activations_that_are_computed_again_change_nothing(make_trainer, mode, every):
    plain, again = make_trainer(), make_trainer(activations=mode, activations_every=every)
    assert train(again, 3) == train(plain, 3)
    assert same_weights(plain, again)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_rate_follows_the_schedule(make_trainer, schedule):
    trainer = make_trainer(schedule=schedule, steps=10, warmup=2)
    rates = []
    for _ in range(10):
        trainer.train_step()
        rates.append(trainer.learning_rate)
    assert rates[0] == pytest.approx(3e-3 / 2)
    assert max(rates) == rates[2] == pytest.approx(3e-3)
    assert (rates[-1] == rates[2]) is (schedule == "constant" or rates[-1] >= 3e-3)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_only_rises(make_trainer, schedule):
    factor = make_trainer(schedule=schedule, steps=5, warmup=50).schedule
    assert [factor(step) for step in range(5)] == pytest.approx([s / 50 for s in range(1, 6)])


def poison(trainer):
    weight = next(iter(trainer.model.parameters()))
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    trainer.train_step()
    handle.remove()


def test_a_step_with_gradients_that_are_not_finite_changes_nothing(make_trainer):
    trainer, other = make_trainer(), make_trainer()
    poison(trainer)
    assert trainer.guard.num_in_a_row == 1
    assert trainer.step == 1
    assert same_weights(trainer, other)
    assert not trainer.optimizer.state
    trainer.train_step()
    assert trainer.guard.num_in_a_row == 0
    assert not same_weights(trainer, other)


def test_too_many_such_steps_end_the_run(make_trainer):
    trainer = make_trainer(max_skipped=2)
    poison(trainer)
    with pytest.raises(
        NonFiniteGradientError,
        match=r"2 steps in a row .*\nfirst affected parameter: 'token.weight'",
    ):
        poison(trainer)


def test_the_same_settings_give_the_same_run(make_trainer):
    first, second = make_trainer(), make_trainer()
    assert train(first, 5) == train(second, 5)
    assert same_weights(first, second)


def test_warming_up_changes_nothing(make_trainer):
    cold, warm = make_trainer(), make_trainer()
    assert warm.warm_up() > 0
    assert train(warm, 3) == train(cold, 3)
    assert same_weights(warm, cold)


def test_bf16_computes_in_bf16_and_keeps_float32_gradients(make_trainer):
    full, half = make_trainer(), make_trainer(bf16=True)
    losses = full.train_step(), half.train_step()
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert {flat.dtype for flat in half.parallel.flats} == {torch.float32}


def test_gains_are_not_decayed(make_trainer):
    groups = make_trainer().optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(weight.dim() == 2 for weight in groups[0]["params"])
    assert all(weight.dim() == 1 for weight in groups[1]["params"])


def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(make_trainer, tmp_path):
    straight = make_trainer()
    losses = train(straight, 10)

    stopped = make_trainer()
    train(stopped, 4)
    torch.manual_seed(5)
    save(tmp_path / "c", stopped.state(), async_op=True).wait()
    drawn = torch.rand(3)

    resumed = make_trainer(batch=4)
    resumed.resume(tmp_path / "c")
    assert torch.equal(torch.rand(3), drawn)
    assert (resumed.step, resumed.samples) == (4, 16)
    assert train(resumed, 6) == losses[4:]
    assert same_weights(straight, resumed)


def test_a_resumed_run_may_have_another_batch(make_trainer, tmp_path):
    """The position in the data is a count of samples: none is seen twice, none left out."""
    trainer = make_trainer()
    train(trainer, 3)
    save(tmp_path / "c", trainer.state())
    resumed = make_trainer(batch=6)
    resumed.resume(tmp_path / "c")
    assert resumed.samples == 12
    following = torch.cat([trainer.fetch_batch().tokens for _ in range(2)])
    assert torch.equal(resumed.fetch_batch().tokens, following[:6])


def test_samples_are_repeatable_and_continue_the_prompt(make_trainer):
    model = make_trainer().model
    text = generate(model, BYTES, b"def ", num_tokens=20, seed=1)
    assert text.startswith("def ")
    assert text == generate(model, BYTES, b"def ", num_tokens=20, seed=1)
    assert text != generate(model, BYTES, b"def ", num_tokens=20, seed=2)


def test_samples_cannot_control_the_terminal():
    assert printable(b"a\x1b[2J\nb\xff") == "a\ufffd[2J\nb\ufffd"
