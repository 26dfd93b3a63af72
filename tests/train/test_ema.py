"""The moving average of parameters, whole and in shards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.train.ema import ExponentialMovingAverage, half_life  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

_STEPS = 4


def _averages(average):
    return [state["average"] for state in average.state.values()]


def test_it_is_the_recurrence_with_a_warmup():
    model = nn.Linear(3, 2)
    average = ExponentialMovingAverage(model, decay=0.25)
    expected = [p.detach().clone() for p in model.parameters()]
    for number in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number + 1.0)
        average.update()
        decay = min(0.25, (1 + number) / (10 + number))
        expected = [
            decay * mean + (1 - decay) * p.detach()
            for mean, p in zip(expected, model.parameters(), strict=True)
        ]
    assert average.num_updates == 6
    for found, mean in zip(_averages(average), expected, strict=True):
        torch.testing.assert_close(found, mean)


def test_without_warmup_the_decay_is_constant():
    parameter = nn.Parameter(torch.zeros(2))
    average = ExponentialMovingAverage([parameter], 0.75, warmup=False)
    parameter.data.fill_(4.0)
    average.update()
    assert _averages(average)[0].tolist() == [1.0, 1.0]


def test_parameters_have_their_bits_again_also_after_an_exception():
    model = nn.Linear(3, 2)
    average = ExponentialMovingAverage(model, 0.5)
    first = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.weight.mul_(1.7)
    trained = [p.detach().clone() for p in model.parameters()]

    def evaluate():
        with average.applied():
            assert torch.equal(model.weight, first[0])
            raise RuntimeError("in evaluation")

    with pytest.raises(RuntimeError, match="in evaluation"):
        evaluate()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained, strict=True))
    average.update()


def test_what_would_mix_averages_and_parameters_is_refused():
    average = ExponentialMovingAverage(nn.Linear(3, 2))
    with average.applied():
        for call in (average.update, lambda: average.load_state_dict(average.state_dict())):
            with pytest.raises(ValueError, match=r"inside applied\(\)"):
                call()
        with pytest.raises(ValueError, match="is not allowed inside"), average.applied():
            pass
    with pytest.raises(TypeError, match="call update"):
        average.step()


def test_bfloat16_parameters_are_averaged_in_float32_also_after_loading():
    model = nn.Linear(3, 2).bfloat16()
    average = ExponentialMovingAverage(model, 0.999, warmup=False)
    before = _averages(average)[0].clone()
    model.weight.data.add_(1.0)
    average.update()
    change = _averages(average)[0] - before
    torch.testing.assert_close(change, torch.full_like(change, 0.001), atol=2e-5, rtol=0.02)
    other = ExponentialMovingAverage(nn.Linear(3, 2).bfloat16(), 0.5)
    other.load_state_dict(average.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(_averages(other), _averages(average), strict=True))
    assert other.num_updates == 1


def test_frozen_parameters_are_left_alone_and_tied_ones_averaged_once():
    model = models.Gpt()
    model.position.weight.requires_grad_(False)
    average = ExponentialMovingAverage(model)
    assert len(_averages(average)) == len(list(model.parameters())) - 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExponentialMovingAverage(nn.Linear(2, 2), 1.0), "decay must be"),
        (lambda: ExponentialMovingAverage(nn.Linear(2, 2), "0.9"), "decay must be"),
        (lambda: ExponentialMovingAverage(nn.Identity()), "no parameter requires gradients"),
        (lambda: half_life(0), "num_steps"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_half_life_forgets_half():
    assert abs(half_life(100) ** 100 - 0.5) < 1e-12


def _sharded_model():
    from echelon.dist.fsdp import fully_shard

    model = models.make()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _optimizer(model):
    """Not Adam, which would blow up the rounding of gradients that are 0, such as a key's bias."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model, average, optimizer, first, last, rank, size):
    """Every rank has the same batch, so that any number of ranks trains alike."""
    for step in range(first, last):
        models.loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()


def _saved(rank, size, folder):
    from echelon.dist.checkpoint import save

    models.join()
    model = _sharded_model()
    average = ExponentialMovingAverage(model, 0.5)
    num_elements = sum(one.numel() for one in _averages(average))
    optimizer = _optimizer(model)
    _train(model, average, optimizer, 0, 2, rank, size)
    save(folder, {"model": model, "optimizer": optimizer, "average": average})
    dist.shutdown()
    return num_elements


def _resumed(rank, size, folder):
    from echelon.dist.checkpoint import load
    from echelon.dist.fsdp import full_state_dict

    models.join()
    model = _sharded_model()
    average = ExponentialMovingAverage(model, 0.9)  # the checkpoint's decay counts
    optimizer = _optimizer(model)
    load(folder, {"model": model, "optimizer": optimizer, "average": average})
    _train(model, average, optimizer, 2, _STEPS, rank, size)
    trained = full_state_dict(model)
    with average.applied():
        averaged = full_state_dict(model)
        loss = models.loss_of(model, 99).item()
    after = full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in trained.items())
    dist.shutdown()
    return averaged, loss, average.num_updates


@pytest.mark.ranks
def test_averages_of_shards_are_saved_by_name_and_loaded_by_another_number_of_ranks(tmp_path):
    """Each rank keeps its part alone; the loss is that of one process."""
    model = models.make()
    whole = sum(p.numel() for p in model.parameters())
    average = ExponentialMovingAverage(model, 0.5)
    _train(model, average, _optimizer(model), 0, _STEPS, 0, 1)
    with average.applied():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        right = models.loss_of(model, 99).item()
    folder = str(tmp_path / "saved")
    assert sum(run_ranks(_saved, 2, folder, timeout_s=120)) == whole
    for found, loss, num_updates in run_ranks(_resumed, 3, folder, timeout_s=120):
        assert num_updates == _STEPS
        assert abs(loss - right) < 1e-5
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
