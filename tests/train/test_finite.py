"""Steps with gradients that are not finite are skipped on all ranks, and counted."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.errors import NonFiniteGradientError  # noqa: E402
from echelon.train.finite import FiniteGuard, NonFinite  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


def _spoilt(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.weight.grad[0, 1] = value
    return model


def test_an_infinite_max_norm_scales_nothing_whatever_the_norm():
    from echelon.dist.fsdp import clip_grad_norm_

    for value in (math.nan, math.inf):
        model = _spoilt(nn.Linear(3, 2), value)
        assert not math.isfinite(clip_grad_norm_(model, math.inf))
        assert model.bias.grad.tolist() == [1.0, 1.0]
        clip_grad_norm_(model, 1.0)
        assert model.weight.grad.isnan().any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_is_skipped_and_gradients_stay_as_they_were(value):
    model = _spoilt(nn.Linear(3, 2), value)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = FiniteGuard(model)
    assert not math.isfinite(guard.clip_grad_norm_(1.0))
    assert not guard.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert model.bias.grad.tolist() == [1.0, 1.0]
    assert guard.locate() == NonFinite(rank=0, parameter="weight", ranks=(0,))
    assert (guard.num_skipped, guard.num_in_a_row) == (1, 1)
    _spoilt(model, 1.0)
    assert guard.clip_grad_norm_(1.0) == pytest.approx(math.sqrt(8))
    assert guard.step(optimizer)
    assert guard.locate() is None
    assert (guard.num_skipped, guard.num_in_a_row) == (1, 0)


def test_it_clips_as_clip_grad_norm_does():
    from echelon.dist.fsdp import clip_grad_norm_

    for max_norm in (0.0, 0.5, 1e9, math.inf):
        mine, other = _spoilt(nn.Linear(3, 2), 5.0), _spoilt(nn.Linear(3, 2), 5.0)
        assert FiniteGuard(mine).clip_grad_norm_(max_norm) == clip_grad_norm_(other, max_norm)
        assert torch.equal(mine.weight.grad, other.weight.grad)


def test_too_many_in_a_row_are_an_error_that_says_where():
    model = nn.Linear(3, 2)
    guard = FiniteGuard(model, max_in_a_row=3)
    for value in (math.nan, math.inf, 1.0, math.nan, math.nan):
        _spoilt(model, value)
        guard.clip_grad_norm_(1.0)
    _spoilt(model, math.nan)
    message = (
        "3 steps in a row.*norm nan, 5 skipped in total.*\n"
        "first affected parameter: 'weight' on rank 0"
    )
    with pytest.raises(NonFiniteGradientError, match=message) as caught:
        guard.clip_grad_norm_(1.0)
    assert (caught.value.rank, caught.value.parameter) == (0, "weight")
    assert len(str(caught.value).splitlines()) == 3


def test_its_counts_are_its_state_and_another_measure_may_be_used():
    guard = FiniteGuard(nn.Linear(2, 2), norm=lambda: math.inf)
    guard.clip_grad_norm_(1.0)
    other = FiniteGuard(nn.Linear(2, 2))
    other.load_state_dict(guard.state_dict())
    assert (other.num_skipped, other.num_in_a_row) == (1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FiniteGuard(nn.Linear(2, 2), max_in_a_row=0), "max_in_a_row must be"),
        (lambda: FiniteGuard(nn.Linear(2, 2)).clip_grad_norm_(-1.0), "max_norm must be"),
        (lambda: FiniteGuard(nn.Linear(2, 2)).clip_grad_norm_(math.nan), "max_norm must be"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _spoil_shard(model, name, value):
    """Spoil one element, if any of this parameter's are here."""
    gradient = dict(model.named_parameters())[name].grad
    if gradient.numel():
        gradient.view(-1)[-1] = value


def _sharded(rank, size):
    """One rank's shard is spoilt in step 1, after the reduction, and in steps 3 and 4."""
    from echelon.dist.fsdp import fully_shard

    models.join()
    model = models.make(depth=1)
    fully_shard(model.blocks[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = FiniteGuard(model, max_in_a_row=2)
    story = []
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        models.loss_of(model, step * size + rank).backward()
        if rank == 1 and step in (1, 3, 4):
            _spoil_shard(model, "blocks.0.up.weight", math.nan if step == 3 else math.inf)
        try:
            norm = guard.clip_grad_norm_(1.0)
        except NonFiniteGradientError as error:
            story.append((error.rank, error.parameter, str(error)))
            break
        taken = guard.step(optimizer)
        optimizer.zero_grad()
        pairs = zip(model.parameters(), before, strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs) == taken
        story.append((taken, repr(norm)))
    dist.shutdown()
    return story


@pytest.mark.ranks
def test_all_ranks_skip_alike_and_stop_with_the_rank_and_the_parameter():
    first, second = run_ranks(_sharded, 2, timeout_s=120)
    assert first == second
    assert [taken for taken, _ in first[:4]] == [True, False, True, False]
    rank, parameter, message = first[4]
    assert (rank, parameter) == (1, "blocks.0.up.weight")
    assert "on rank 1; non-finite gradients on ranks 1" in message


def _stages(rank, size):
    """Two stages: what one finds, the other one skips too, if `over` has both."""
    models.join()
    model = nn.Linear(2, 2)
    guard = FiniteGuard(model, over=dist.world(), max_in_a_row=9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == 1:
        model.bias.grad[0] = math.inf
    norm = guard.clip_grad_norm_(1.0)
    found = guard.locate()
    dist.shutdown()
    return repr(norm), guard.num_skipped, found


@pytest.mark.ranks
def test_stages_of_a_pipeline_skip_together():
    expected = NonFinite(rank=1, parameter="bias", ranks=(1,))
    assert run_ranks(_stages, 2, timeout_s=120) == [("inf", 1, expected)] * 2
