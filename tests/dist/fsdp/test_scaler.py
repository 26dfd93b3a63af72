"""All ranks scale alike, and skip a step together."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def _make(**settings):
    from echelon.dist.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    fully_shard(model[0], **settings)
    return fully_shard(model, **settings)


def _step(model, optimizer, scaler, spoilt=False):
    """Take a step; spoil one element of this rank's gradients. Return whether weights changed."""
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.ones(4, 8)).float().square().mean()).backward()
    if spoilt:
        next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after = list(model.parameters())
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _shards(rank, size):
    from echelon.dist.fsdp import GradScaler, MixedPrecisionPolicy

    models.join()
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = _make(mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler(2.0**20, growth_interval=2)
    story = []
    for step in range(8):
        moved = _step(model, optimizer, scaler, spoilt=rank == 1 and step == 5)
        story.append((moved, scaler.get_scale()))
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    dist.shutdown()
    return story


def test_float16_overflows_skip_the_step_on_all_ranks_and_the_scale_finds_its_place():
    first, second = run_ranks(_shards, 2, timeout_s=120)
    assert first == second
    assert not first[0][0], "2**20 overflows float16"
    assert any(moved for moved, _ in first[:5])
    assert not first[5][0], "one rank had an overflow"
    assert first[5][1] == first[4][1] / 2
    scales = [2.0**20, *(scale for _, scale in first)]
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))


def _stages(rank, size):
    """Two stages of two ranks: what one rank of one stage finds, the other stage must know."""
    from echelon.dist.fsdp import GradScaler

    models.join()
    world = dist.world()
    model = _make(group=world.split(rank // 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared, apart = GradScaler(4.0, over=world), GradScaler(4.0)
    spoilt = [_step(model, optimizer, one, spoilt=rank == 3) for one in (shared, apart)]
    clean = _step(model, optimizer, shared)
    dist.shutdown()
    return [*spoilt, clean, shared.get_scale(), apart.get_scale()]


def test_an_overflow_in_one_stage_is_known_in_the_others():
    """And without `over`, in the ranks of that stage only."""
    results = run_ranks(_stages, 4, timeout_s=120)
    assert results[:2] == [[False, True, True, 2.0, 4.0]] * 2
    assert results[2:] == [[False, False, True, 2.0, 2.0]] * 2


def _saved(rank, size, folder):
    from echelon.dist.checkpoint import load, save
    from echelon.dist.fsdp import GradScaler

    models.join()
    scaler = GradScaler(8.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([1.0, float("nan")])
    scaler.step(optimizer)
    scaler.update()
    save(folder, {"scaler": scaler})
    fresh = GradScaler()
    load(folder, {"scaler": fresh})
    dist.shutdown()
    return fresh.get_scale()


def test_its_state_goes_into_a_checkpoint(tmp_path):
    assert run_ranks(_saved, 2, str(tmp_path / "saved"), timeout_s=120) == [4.0, 4.0]


def _wrong(rank, size):
    from echelon.dist.fsdp import GradScaler

    scaler = GradScaler()
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ValueError, match="gradients are float16"):
        scaler.unscale_(torch.optim.SGD([parameter]))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="before update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="already been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="init_scale"):
        GradScaler(0.0)
    with pytest.raises(ValueError, match="backoff_factor"):
        GradScaler(backoff_factor=1.0)
    off = GradScaler(enabled=False)
    loss = torch.ones(())
    assert off.scale(loss) is loss
    off.update()


def test_wrong_calls_are_errors():
    run_ranks(_wrong, 1, timeout_s=120)  # in a process that has loaded what optimizers need
