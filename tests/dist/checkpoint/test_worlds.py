"""What any number of ranks saved, any other number loads, and training goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import RandomState, load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import newest, read_manifest  # noqa: E402
from tests.dist.checkpoint.states import make, same, train  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
SAVERS, LOADERS = (1, 2, 3), (1, 2, 4)


def _save(rank, world_size, folder):
    """Train 3 steps, save, train 3 more; return what a loader has to come to."""
    world = dist.init()
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    state = {"model": model, "optimizer": optimizer, "samples": 36, "by": f"rank {rank}"}
    save(Path(folder, f"by_{world_size}"), state)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, optimizer, 3, 6)
    world.barrier()
    dist.shutdown()
    return losses, {name: value.numpy() for name, value in saved.items()}


def _load(rank, world_size, folder):
    dist.init()
    results = {}
    for num_savers in SAVERS:
        model, optimizer = make(seed=1)
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # must be taken over
        state = {"model": model, "optimizer": optimizer, "samples": 0}
        returned = load(Path(folder, f"by_{num_savers}"), state)
        assert returned is state
        assert (state["samples"], state["by"]) == (36, "rank 0")
        assert model.head.weight is model.token.weight
        loaded = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        results[num_savers] = train(model, optimizer, 3, 6), loaded
    dist.shutdown()
    return results


def test_any_number_of_ranks_loads_what_any_other_number_saved(tmp_path):
    saved = {n: run_ranks(_save, n, str(tmp_path))[0] for n in SAVERS}
    for num_loaders in LOADERS:
        for results in run_ranks(_load, num_loaders, str(tmp_path)):
            for num_savers, (losses, loaded) in results.items():
                expected_losses, weights = saved[num_savers]
                assert all(np.array_equal(loaded[name], weights[name]) for name in weights)
                assert losses == pytest.approx(expected_losses, abs=1e-5)
                if num_loaders == num_savers:
                    assert losses == expected_losses  # bit for bit


def test_ranks_divide_the_writing_evenly(tmp_path):
    run_ranks(_save, 3, str(tmp_path))
    version = newest(tmp_path / "by_3")
    sizes = [file.num_bytes for file in read_manifest(version).files.values()]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 8
    model, _ = make()
    weights = sum(p.nbytes for p in model.parameters()) + model.counts.nbytes
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    steps = 4 * sum(p.requires_grad for p in model.parameters())
    assert sum(sizes) == weights + 2 * trained + steps  # everything once, the tied weight too


def _random(rank, world_size, folder, saves):
    dist.init()
    torch.manual_seed(rank + 10)
    path = Path(folder, "random")
    if saves:
        torch.rand(3)
        save(path, {"random": RandomState()})
    else:
        load(path, {"random": RandomState()})
    drawn = [torch.rand(1).item(), float(np.random.random()), __import__("random").random()]
    dist.shutdown()
    return drawn


def test_each_rank_gets_its_generators_back_and_new_ranks_get_their_own(tmp_path):
    before = run_ranks(_random, 2, str(tmp_path), True)
    after = [run_ranks(_random, 4, str(tmp_path), False) for _ in range(2)]
    assert after[0] == after[1]
    assert after[0][:2] == before
    assert len({drawn[0] for drawn in after[0]}) == 4


def _stages(rank, world_size, folder):
    """Two ranks with different modules under one name, as pipeline stages are: both are saved."""
    dist.init()
    model, optimizer = make()
    part = torch.nn.Module()
    part.up = model.up if rank == 0 else None
    part.down = model.down if rank == 1 else None
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1 + rank, momentum=0.9)
    sum(p.sum() for p in part.parameters()).backward()
    optimizer.step()
    path = Path(folder, "stages")
    save(path, {"model": part, "optimizer": optimizer})
    other = make(seed=3)[0]
    for name, parameter in part.named_parameters():
        setattr_by_path(other, name, parameter)
    before = {name: p.detach().clone() for name, p in part.named_parameters()}
    with torch.no_grad():
        for p in part.parameters():
            p.zero_()
    load(path, {"model": part, "optimizer": optimizer})
    assert all(torch.equal(p, before[name]) for name, p in part.named_parameters())
    dist.shutdown()
    return {name: value.numpy() for name, value in before.items()}


def setattr_by_path(module, name, value):
    *folders, last = name.split(".")
    for folder in folders:
        module = getattr(module, folder)
    setattr(module, last, value)


def test_ranks_with_different_parts_save_their_union(tmp_path):
    parts = run_ranks(_stages, 2, str(tmp_path))
    whole = torch.nn.Module()
    whole.up, whole.down = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)
    load(tmp_path / "stages", {"model": whole})
    expected = {**parts[0], **parts[1]}
    assert len(expected) == 4
    for name, parameter in whole.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), expected[name])


def _under_torch(rank, world_size, folder, backend):
    import torch.distributed

    torch.distributed.init_process_group(backend)
    model, optimizer = make()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    save(Path(folder, "ddp"), {"model": wrapped, "optimizer": optimizer, "rank": rank})
    fresh = make(seed=1)[0]
    state = load(Path(folder, "ddp"), {"model": fresh})
    assert same(model.state_dict(), fresh.state_dict())
    del wrapped  # its end uses the group
    torch.distributed.destroy_process_group()
    return state["rank"]


@pytest.mark.parametrize("backend", ["gloo", "echelon"])
def test_torch_distributed_and_its_ddp_will_do(tmp_path, backend):
    assert run_ranks(_under_torch, 2, str(tmp_path), backend) == [0, 0]
    model = make(seed=2)[0]
    load(tmp_path / "ddp", {"model": model})  # the names are the plain module's
    assert same(model.state_dict(), make()[0].state_dict())


def _fsdp2(rank, world_size, folder):
    import torch.distributed
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model, _ = make()
    del model.scale  # FSDP2 shards no scalars
    model.scale = 0.5
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(10).view(2, 5)
    model(tokens).sum().backward()
    optimizer.step()
    save(Path(folder, "fsdp2"), {"model": model, "optimizer": optimizer})
    moments = {i: s["exp_avg"].full_tensor() for i, s in enumerate(optimizer.state.values())}
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    other, _ = make(seed=4)
    del other.scale
    other.scale = 0.5
    fully_shard(other)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
    load(Path(folder, "fsdp2"), {"model": other, "optimizer": theirs})
    again = {i: s["exp_avg"].full_tensor() for i, s in enumerate(theirs.state.values())}
    assert same(moments, again)
    assert not same(whole["up.weight"], full["up.weight"])
    torch.distributed.destroy_process_group()
    return {name: value.numpy() for name, value in full.items()}


def test_torchs_fsdp2_saves_shards_that_one_process_loads(tmp_path):
    full = run_ranks(_fsdp2, 2, str(tmp_path))[0]
    model = make(seed=2)[0]
    del model.scale
    load(tmp_path / "fsdp2", {"model": model})
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), full[name]), name
