"""Sharded models: saved by any number of ranks, loaded by any other, sharded or whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import export, load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import newest, read_manifest  # noqa: E402
from echelon.dist.fsdp import MixedPrecisionPolicy, full_state_dict, fully_shard  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from tests.dist.checkpoint.states import batch, make, train  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WORLDS = (1, 2, 3)


def make_sharded(seed=0, group=None, mixed=None, mesh=None):
    model, _ = make(seed)
    fully_shard([model.up, model.down], group=group, mesh=mesh, mp_policy=mixed)
    fully_shard(model, group=group, mesh=mesh, mp_policy=mixed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, first, last):
    world = dist.world()
    losses = []
    for index in range(first, last):
        tokens = batch(index, world.rank, world.size)
        optimizer.zero_grad()
        logits = model(tokens).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().reshape(1).clone()
        world.all_reduce(mean, op="avg")
        losses.append(mean.item())
    return losses


def numpy_of(state):
    return {name: value.numpy() for name, value in state.items()}


def _save(rank, world_size, folder):
    dist.init()
    model, optimizer = make_sharded()
    step(model, optimizer, 0, 3)
    pending = save(
        Path(folder, f"by_{world_size}"),
        {"model": model, "optimizer": optimizer, "samples": 36},
        async_op=True,
    )
    whole = numpy_of(full_state_dict(model))
    losses = step(model, optimizer, 3, 6)
    pending.wait()
    dist.shutdown()
    return losses, whole


def _load(rank, world_size, folder):
    dist.init()
    results = {}
    for num_savers in WORLDS:
        for whole in (False, True):
            model, optimizer = make(seed=1) if whole else make_sharded(seed=1)
            if whole:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            else:
                step(model, optimizer, 7, 8)  # what was gathered before must not stay
            state = {"model": model, "optimizer": optimizer, "samples": 0}
            load(Path(folder, f"by_{num_savers}"), state)
            assert state["samples"] == 36
            weights = numpy_of(model.state_dict() if whole else full_state_dict(model))
            weights = {name: value.copy() for name, value in weights.items()}
            losses = (train if whole else step)(model, optimizer, 3, 6)
            results[num_savers, whole] = losses, weights
    dist.shutdown()
    return results


def test_any_world_loads_any_worlds_shards_sharded_or_whole(tmp_path):
    saved = {n: run_ranks(_save, n, str(tmp_path))[0] for n in WORLDS}
    for num_loaders in (1, 2, 4):
        for results in run_ranks(_load, num_loaders, str(tmp_path)):
            for (num_savers, _), (losses, weights) in results.items():
                expected_losses, expected = saved[num_savers]
                for name, value in expected.items():
                    assert np.array_equal(weights[name], value), name
                assert losses == pytest.approx(expected_losses, abs=1e-5)


def test_each_rank_writes_its_shards_and_a_share_of_the_rest(tmp_path):
    run_ranks(_save, 3, str(tmp_path))
    manifest = read_manifest(newest(tmp_path / "by_3"))
    weight = manifest.tensors["model/token.weight"]
    assert weight.shape == (13, 6)
    assert len({one.file for tensor in manifest.tensors.values() for one in tensor.ranges}) == 3
    assert sum(len(tensor.ranges) == 1 for tensor in manifest.tensors.values()) > 10
    assert manifest.aliases["model/head.weight"] == "model/token.weight"
    export(tmp_path / "by_3", tmp_path / "model.safetensors")
    model = make(seed=5)[0]
    load(tmp_path / "model.safetensors", {"model": model})
    other = make(seed=6)[0]
    load(tmp_path / "by_3", {"model": other})
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def _mesh(rank, world_size, folder):
    """Replicas of shards: each element is written once; bfloat16 computing keeps float32 shards."""
    dist.init()
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    model, optimizer = make_sharded(0, None, MixedPrecisionPolicy(param_dtype=torch.bfloat16), mesh)
    step(model, optimizer, 0, 2)
    save(Path(folder, "mesh"), {"model": model, "optimizer": optimizer})
    whole = numpy_of(full_state_dict(model))
    dist.shutdown()
    return whole


def test_equal_shards_of_a_mesh_are_written_once(tmp_path):
    whole = run_ranks(_mesh, 4, str(tmp_path))[0]
    version = newest(tmp_path / "mesh")
    manifest = read_manifest(version)
    written = sum(file.num_bytes for file in manifest.files.values())
    needed = sum(
        tensor.numel * (8 if "counts" in path else 4) for path, tensor in manifest.tensors.items()
    )
    num_steps = sum(path.endswith("/step") for path in manifest.tensors)
    assert written <= needed + 4 * 3 * num_steps  # step counts may be there from several ranks
    assert {manifest.tensors[path].dtype for path in ("model/up.weight", "model/token.weight")} == {
        "float32"
    }
    model = make(seed=2)[0]
    load(tmp_path / "mesh", {"model": model})
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), whole[name]), name
