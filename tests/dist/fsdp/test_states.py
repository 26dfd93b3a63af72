"""What a sharded model holds, gives and takes: shards, whole states, memory, norms, optimizers."""

from __future__ import annotations

import copy
import math
import resource
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def shard(model, **settings):
    from echelon.dist.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def _states(rank, size):
    from echelon.dist.fsdp import full_state_dict, is_part, optimizer_state, shards

    models.join()
    plain = models.make()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = shard(models.make())
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in plain.parameters())
    assert [p.dim() for p in model.parameters()] == [p.dim() for p in plain.parameters()]

    parts = shards(model)
    assert list(parts) == [name for name, _ in plain.named_parameters()]
    assert parts["token.weight"].aliases == ("head.weight",)
    ranges = dist.world().all_gather_object(
        {name: [part.start, part.length] for name, part in parts.items()}
    )
    for name, part in parts.items():
        whole = expected[name].flatten()
        assert part.shape == expected[name].shape
        assert part.ranks == tuple(range(size))
        assert torch.equal(part.data, whole[part.start : part.start + part.length])
        owned = [tuple(one[name]) for one in ranges if one[name][1]]
        ends = [start + length for start, length in owned]
        assert [start for start, _ in owned] == [0, *ends[:-1]]
        assert ends[-1] == whole.numel()

    optimizer = models.make_optimizer(model)
    models.loss_of(model, 0).backward()
    optimizer.step()
    for part in parts.values():
        state = optimizer_state(optimizer, part)
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == (part.length,)
        assert is_part(optimizer.state[part.parameter]["exp_avg"], part)
        assert not is_part(state["step"], part)

    trained = full_state_dict(model)
    assert not torch.equal(trained["head.weight"], expected["head.weight"])
    first_only = full_state_dict(model, rank0_only=True)
    assert list(first_only) == (list(trained) if rank == 0 else [])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(expected)  # whole parameters
    again = full_state_dict(model)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    model.load_state_dict(saved)  # shards
    again = full_state_dict(model)
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(saved, assign=True)

    for part in parts.values():  # what is written into a shard is what the model computes with
        part.data.zero_()
    with torch.no_grad():
        assert model(models.batch(0)[0]).abs().sum() == 0
    dist.shutdown()


def test_shards_and_whole_states():
    run_ranks(_states, 3)


def _resident(tensor) -> int:
    """Return how many bytes of a tensor's pages are in memory."""
    size, page = tensor.nbytes, resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(tensor.data_ptr() // page * 8)
        entries = np.frombuffer(table.read(-(-size // page) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


def _memory(rank, size):
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.fsdp.parameters.unit import unit_of
    from echelon.dist.fsdp.step.driver import driver_of

    models.join()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    flats = [unit_of(layer).flats[0] for layer in model]
    whole = 4 << 20

    def resident():
        return [_resident(flat.full.tensor) for flat in flats]

    assert max(resident()) == 0
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: seen.append(resident()))
    x = torch.randn(2, 1024, requires_grad=True)
    for step in range(2):
        seen.clear()
        model.zero_grad()
        loss = model(x).sum()
        for index, sizes in enumerate(seen):
            assert sizes[index] == whole
            due = range(index, index + (3 if step else 1))  # the first step learns the order
            others = [size for at, size in enumerate(sizes) if at not in due]
            assert sum(others) <= (1 + step) * whole, (step, index)  # to be passed on to the next
        assert sum(resident()) <= (2 + step) * whole  # what comes first in backward is kept
        loss.backward()
        assert sum(resident()) == 0
        # Gradients: pooled buffers of whole units, no more than are in flight at a time.
        assert driver_of(unit_of(model[0])).memory.pool.num_bytes <= 3 * whole
    dist.shutdown()


def test_only_the_units_at_work_are_in_memory():
    run_ranks(_memory, 2)


def _clip(rank, size):
    from echelon.dist.fsdp import clip_grad_norm_
    from echelon.dist.fsdp.parameters.member import member_of

    models.join()
    norms = []
    for norm_type in (2.0, 1.0, math.inf):
        plain = models.make()
        for index in range(size):
            (models.loss_of(plain, index) / size).backward()
        expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type))
        model = shard(models.make())
        models.loss_of(model, rank).backward()
        norm = clip_grad_norm_(model, 0.05, norm_type)
        assert type(norm) is float
        assert norm == pytest.approx(expected, rel=1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            part = member_of(p).part
            mine = q.grad.flatten()[part.start : part.start + part.length]
            torch.testing.assert_close(p.grad.flatten(), mine, rtol=1e-4, atol=1e-8)
        assert clip_grad_norm_(model, 1e9, norm_type) <= 0.051
        norms.append(norm.hex())
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(model, -1.0)
    dist.shutdown()
    return norms


def test_the_norm_is_the_same_bits_on_every_rank():
    first, *others = run_ranks(_clip, 3)
    assert others == [first, first]


class RowNorm(torch.optim.Optimizer):
    """Scales by the norm of the whole parameter, as LAMB does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


class Sign(RowNorm):
    """Elementwise."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


def _optimizers(rank, size):
    models.join()
    kinds = [RowNorm, torch.optim.Adafactor]
    if hasattr(torch.optim, "Muon"):
        kinds.append(lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]))
    for early in (True, False):
        for kind in kinds:
            model = models.make()
            optimizer = kind(model.parameters()) if early else None
            shard(model)
            optimizer = optimizer or kind(model.parameters())
            models.loss_of(model, rank).backward()
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match="is not elementwise"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
    for kind in (Sign, torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop):
        model = shard(models.make())
        optimizer = kind(model.parameters(), lr=0.01)
        models.loss_of(model, rank).backward()
        optimizer.step()
    dist.shutdown()


def test_an_optimizer_that_is_not_elementwise_is_refused():
    run_ranks(_optimizers, 2)


DTYPES = (torch.float32, torch.float64)


def _arguments(rank, size):
    from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard
    from echelon.dist.mesh import DeviceMesh

    models.join()
    mesh = DeviceMesh((2,), ("only",))
    layer = nn.Linear(2, 2)
    for arguments, settings, text in [
        ((nn.ModuleList([layer]),), {}, "has no forward"),
        (([],), {}, "at least one"),
        ((layer, "world"), {}, "must be a ProcessGroup"),
        ((layer, mesh), {}, "pass a mesh as mesh="),
        ((layer, dist.world(), mesh), {}, "mutually exclusive"),
        ((layer,), {"mesh": (2, 2)}, "mesh must be"),
        ((layer,), {"offload_policy": True}, "CPUOffloadPolicy"),
        ((nn.Linear(2, 2, dtype=torch.complex64),), {}, "complex64"),
        ((layer,), {"reshard_after_forward": 3}, "divides"),
        ((layer,), {"mp_policy": torch.bfloat16}, "MixedPrecisionPolicy"),
        ((layer,), {"prefetch": -1}, "prefetch"),
        ((layer,), {"prefetch": "2"}, "prefetch must be a number of units >= 0, got '2'"),
        ((5,), {}, "takes modules, got int"),
        ((layer,), {"ignored_params": ["weight"]}, "ignored_params must be parameters"),
        ((layer,), {"ignored_params": layer.weight}, "ignored_params must be parameters"),
    ]:
        with pytest.raises(ValueError, match=text):
            fully_shard(*arguments, **settings)
    with pytest.raises(ValueError, match=r"torch\.dtype"):
        MixedPrecisionPolicy(param_dtype="bf16")
    kinds = (nn.Linear, nn.Conv1d)
    for arguments, text in [
        (
            {"memory_budget_bytes": (0, 1 << 30)[rank]},
            "_bytes .* is 0 on rank 0, 107.* on rank 1",
        ),
        ({"prefetch": rank}, "prefetch must be equal .* 'world', but is 0 on rank 0, 1 on rank 1"),
        ({"reshard_after_forward": bool(rank)}, "reshard_after_forward must be equal"),
        ({"mp_policy": MixedPrecisionPolicy(output_dtype=DTYPES[rank])}, "mp_policy must be eq"),
        ({"module": kinds[rank](2, 2, 1)}, "module must be equal .* 'Linear' on rank 0, 'Conv1d'"),
    ]:
        with pytest.raises(ValueError, match=text):
            fully_shard(**{"module": layer, **arguments})
    fully_shard(layer)
    with pytest.raises(ValueError, match="already sharded"):
        fully_shard(layer)
    dist.shutdown()


def test_bad_arguments_are_said_clearly():
    run_ranks(_arguments, 2, timeout_s=120)


def _two_modules(rank, size):
    from echelon.dist.fsdp import full_state_dict, fully_shard

    models.join()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    both = fully_shard([model[0], model[1]])
    assert both == [model[0], model[1]]
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            one(torch.full((1, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
    state = full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)
    dist.shutdown()


def test_a_unit_of_two_modules_trains_as_the_plain_modules_do():
    run_ranks(_two_modules, 2, timeout_s=120)
