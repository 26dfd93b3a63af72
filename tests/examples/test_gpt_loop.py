"""Training in a world of one: it learns, and it goes on exactly where it was stopped."""

from __future__ import annotations

import pytest
import torch
from gpt.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gpt.data import validation_windows
from gpt.sample import generate, printable

IDENTITY = {"seed": 0}


def train(trainer, num_steps: int) -> list[float]:
    return [trainer.train_step() for _ in range(num_steps)]


def same_weights(one, other) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_training_learns(make_trainer, dataset):
    trainer = make_trainer(steps=60)
    windows = validation_windows(dataset.validation, num_windows=8, context=16)
    before = trainer.validate(windows)
    train(trainer, 60)
    assert trainer.validate(windows) < before - 1.0


def test_the_loss_is_the_mean_over_the_global_batch(make_trainer):
    trainer = make_trainer()
    tokens, targets = trainer.source.batch_at(0)
    expected = torch.nn.functional.cross_entropy(
        trainer.model(tokens).flatten(0, 1), targets.flatten()
    ).item()
    assert trainer.train_step() == pytest.approx(expected, rel=1e-6)


def test_the_same_settings_give_the_same_run(make_trainer):
    first, second = make_trainer(), make_trainer()
    assert train(first, 5) == train(second, 5)
    assert same_weights(first, second)


def test_bf16_computes_in_bf16_and_keeps_float32_gradients(make_trainer):
    full, half = make_trainer(), make_trainer(bf16=True)
    losses = full.train_step(), half.train_step()
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert {flat.dtype for flat in half.buckets.flats} == {torch.float32}


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
    save_checkpoint(tmp_path / "c.pt", {"identity": IDENTITY, **stopped.state_dict()})

    resumed = make_trainer()
    resumed.load_state_dict(load_checkpoint(tmp_path / "c.pt", identity=IDENTITY))
    torch.rand(3)  # whatever else happens in the process must not matter
    assert resumed.step == 4
    assert train(resumed, 6) == losses[4:]
    assert same_weights(straight, resumed)


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"identity": IDENTITY, "step": 1})
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(path, {"identity": IDENTITY, "step": lambda: 2})
    assert load_checkpoint(path, identity=IDENTITY)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"identity": {"seed": 1, "width": 16}})
    with pytest.raises(CheckpointError, match=r"another run: seed 1 there, 0 here$"):
        load_checkpoint(path, identity={"seed": 0, "width": 16})


class Intruder:
    """An object whose unpickling would run code."""

    def __reduce__(self):
        return (print, ("arbitrary code ran",))


@pytest.mark.parametrize(
    "content", [b"", b"no checkpoint", b"PK\x03\x04 cut short", [1, 2], {"format": 99}, Intruder()]
)
def test_foreign_files_get_one_clear_line(tmp_path, capfd, content):
    path = tmp_path / "c.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, identity=IDENTITY)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "arbitrary code" not in capfd.readouterr().out


def test_a_missing_checkpoint_gets_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(tmp_path / "none.pt", identity=IDENTITY)


def test_samples_are_repeatable_and_continue_the_prompt(make_trainer):
    model = make_trainer().model
    text = generate(model, b"def ", num_bytes=20, seed=1)
    assert text.startswith("def ")
    assert text == generate(model, b"def ", num_bytes=20, seed=1)
    assert text != generate(model, b"def ", num_bytes=20, seed=2)


def test_samples_cannot_control_the_terminal():
    assert printable(b"a\x1b[2J\nb\xff") == "a\ufffd[2J\nb\ufffd"
