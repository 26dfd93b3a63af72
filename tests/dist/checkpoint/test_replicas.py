"""What ranks hold under one name is proved equal, kept apart, or refused; it is never mixed."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import export, load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import newest, read_manifest, versions  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def refused(path, state, match, **options):
    """Save on this rank; return the error's type. Nothing is left behind."""
    with pytest.raises((ValueError, CheckpointError), match=match) as error:
        save(path, state, **options)
    dist.world().barrier()
    assert not versions(Path(path))
    return type(error.value).__name__


def numbered(*sizes, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)))


def _stages_of_one_shape(rank, world_size, folder):
    """Equal names and shapes, other weights: what stages that number their layers from 0 are."""
    dist.init()
    stage = numbered(4, 4, 4, seed=rank)
    before = {name: value.clone() for name, value in stage.state_dict().items()}
    kind = refused(folder + "/a", {"model": stage}, r"model/0.weight.* differs between ranks 0 and")
    background = refused(folder + "/b", {"model": stage}, "differs between", async_op=True)
    save(folder + "/c", {f"stage{rank}": stage})  # kept apart by the caller: saved
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    load(folder + "/c", {f"stage{rank}": stage})
    right = all(torch.equal(value, before[name]) for name, value in stage.state_dict().items())
    dist.shutdown()
    return kind, background, right


def test_stages_with_the_names_of_each_other_are_refused(tmp_path):
    results = run_ranks(_stages_of_one_shape, 2, str(tmp_path))
    assert results == [("ValueError", "ValueError", True)] * 2


def _uneven_stages(rank, world_size, folder):
    """Three layers and two: the names collide in part, with equal and with other shapes."""
    dist.init()
    same = refused(folder, {"model": numbered(*[4] * (4 - rank), seed=rank)}, "0.weight.* differs")
    other = refused(
        folder,
        {"model": numbered(4, 4 + rank)},
        rf"model/0.weight is float32\[{4 + rank}, 4\] on rank {rank}, but differs on rank",
    )
    dist.shutdown()
    return same, other


def test_names_that_collide_in_part_are_refused(tmp_path):
    results = run_ranks(_uneven_stages, 2, str(tmp_path))
    assert results == [("ValueError", "ValueError")] * 2


def _some_alike(rank, world_size, folder):
    """Ranks 0 and 1 are replicas, as 2 and 3 are; a third module is equal on all four."""
    dist.init()
    stage = numbered(4, 5, seed=rank // 2)
    common = numbered(6, 7, seed=9)
    state = {f"stage{rank // 2}": stage, "common": common}
    save(folder, state)
    expected = {name: value.clone() for name, value in stage.state_dict().items()}
    with torch.no_grad():
        for parameter in [*stage.parameters(), *common.parameters()]:
            parameter.zero_()
    load(folder, state)
    assert all(torch.equal(value, expected[name]) for name, value in stage.state_dict().items())
    with torch.no_grad():
        if rank == 3:  # the replica of one stage has drifted
            stage[0].bias[2] += 1e-3
    with pytest.raises((ValueError, CheckpointError)) as error:
        save(folder, state)
    dist.shutdown()
    return type(error.value).__name__, str(error.value)


def test_each_of_several_groups_of_replicas_is_compared_and_written_once(tmp_path):
    results = run_ranks(_some_alike, 4, str(tmp_path))
    assert [kind for kind, _ in results] == ["CheckpointError"] * 2 + ["ValueError"] * 2
    assert all("stage1/0.bias differs between ranks 2 and 3" in text for _, text in results)
    manifest = read_manifest(newest(tmp_path))
    written = sum(file.num_bytes for file in manifest.files.values())
    assert written == 4 * (2 * 25 + 49)
    assert all(len(t.ranges) <= 4 for t in manifest.tensors.values())
    assert len({r.file for t in manifest.tensors.values() for r in t.ranges}) == 4


def _tensors_in_values(rank, world_size, folder):
    dist.init()
    kinds = [
        refused(folder, {"t": torch.full((3,), float(rank))}, "t differs between ranks 0 and 1"),
        refused(folder, {"a": np.arange(3) + rank}, "a differs between ranks 0 and 1"),
    ]
    sharded = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(sharded.weight)
    torch.nn.init.ones_(sharded.bias)
    mixed = {"x": sharded if rank == 0 else 7}
    kinds.append(refused(folder, mixed, "x has kind module on rank 0, but kind value on rank 1"))
    dist.shutdown()
    return kinds


def test_tensors_that_differ_and_entries_of_two_kinds_are_refused(tmp_path):
    results = run_ranks(_tensors_in_values, 2, str(tmp_path))
    assert results == [["ValueError"] * 3] * 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.note = "new"

    def forward(self, x):
        return self.norm(self.linear(x))

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def _buffers(rank, world_size, folder):
    dist.init()
    net = Net()
    torch.manual_seed(rank)
    net(torch.randn(8, 3))
    net.note = f"rank {rank}"
    mean = net.norm.running_mean.clone()
    save(folder, {"net": net})
    other = Net()
    load(folder, {"net": other})
    dist.shutdown()
    assert torch.equal(other.norm.running_mean, mean)
    assert other.note == net.note
    assert int(other.norm.num_batches_tracked) == 1
    return mean.tolist()


def test_buffers_that_differ_are_saved_for_each_rank(tmp_path):
    means = run_ranks(_buffers, 2, str(tmp_path))
    assert means[0] != means[1]
    names = set(read_manifest(newest(tmp_path)).tensors)
    assert {"net/norm.running_mean/@0", "net/norm.running_mean/@1"} <= names
    assert "net/norm.num_batches_tracked" in names  # it is equal: once
    net = Net()
    with pytest.warns(RuntimeWarning, match="differ between the 2 ranks that saved them"):
        load(tmp_path, {"net": net})
    assert net.norm.running_mean.tolist() == means[0]
    assert net.note == "rank 0"
    export(tmp_path, tmp_path / "net.pt", "net")
    content = torch.load(tmp_path / "net.pt", weights_only=True)
    assert content["norm.running_mean"].tolist() == means[0]
    assert set(content) == {*Net().state_dict(), "_extra_state"}
    export(tmp_path, tmp_path / "net.safetensors", "net")
    fresh = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fresh.note  # a file of tensors has no extra state
        fresh.__class__ = torch.nn.Module
        load(tmp_path / "net.safetensors", {"net": fresh})
    assert fresh.norm.running_mean.tolist() == means[0]


class Loader:
    """A stateful data loader: each rank reads its own part."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def _loaders(rank, world_size, folder):
    dist.init()
    state = {"at": 10 * rank, "queue": torch.arange(rank + 2), "seen": {"all": [1, 2]}}
    scheduler = Loader({"last_epoch": 3})
    plan = {"loader": Loader(state), "scheduler": scheduler, "step": 5}
    save(folder, plan, async_op=True)
    fresh = {"loader": Loader(None), "scheduler": Loader(None)}
    load(folder, fresh)
    dist.shutdown()
    assert fresh["loader"].state["at"] == 10 * rank
    assert fresh["loader"].state["queue"].tolist() == list(range(rank + 2))
    assert fresh["loader"].state["seen"] == {"all": [1, 2]}
    assert fresh["scheduler"].state == {"last_epoch": 3}
    return True


def _other_world(rank, world_size, folder):
    dist.init()
    with pytest.raises(ValueError, match="loader has a state for each of the 2 ranks that saved"):
        load(folder, {"loader": Loader(None)})
    scheduler = Loader(None)
    assert load(folder, {"scheduler": scheduler})["step"] == 5
    dist.shutdown()
    return scheduler.state


def test_a_loader_of_each_rank_is_saved_for_each_rank(tmp_path):
    assert run_ranks(_loaders, 2, str(tmp_path)) == [True, True]
    assert run_ranks(_other_world, 3, str(tmp_path)) == [{"last_epoch": 3}] * 3
    manifest = read_manifest(newest(tmp_path))
    assert "scheduler" in manifest.values
    export(tmp_path, tmp_path / "all.pt")
    assert set(torch.load(tmp_path / "all.pt", weights_only=True)) == {"scheduler", "step"}


def _settings(rank, world_size, folder):
    """Stages whose optimizers have other learning rates: each parameter keeps its own."""
    dist.init()
    torch.manual_seed(rank)
    stage = torch.nn.ModuleDict({str(rank): torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 + rank, momentum=0.9)
    state = {"model": stage, "optimizer": optimizer}
    save(folder, state)
    optimizer.param_groups[0]["lr"] = 7.0
    load(folder, state)
    dist.shutdown()
    return optimizer.param_groups[0]["lr"]


def test_settings_of_an_optimizer_belong_to_its_parameters(tmp_path):
    assert run_ranks(_settings, 2, str(tmp_path)) == [0.1, 1.1]
    both = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2), "1": torch.nn.Linear(2, 2)})
    one_group = torch.optim.SGD(both.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"optimizer: group 0 .*different settings"):
        load(tmp_path, {"model": both, "optimizer": one_group})
    assert one_group.param_groups[0]["lr"] == 1.0


def test_keys_that_make_one_path_are_kept_apart(tmp_path):
    """In a tree of values {"a": {"b": x}} and {"a/b": y} have one path; 1 and "1" as well."""
    tree = {
        "a": {"b": torch.zeros(3)},
        "a/b": torch.ones(3),
        1: torch.full((2,), 1.0),
        "1": torch.full((2,), 2.0),
    }
    save(tmp_path / "c", {"tree": tree})
    found = load(tmp_path / "c", {"tree": None})["tree"]
    assert found["a"]["b"].tolist() == [0.0] * 3
    assert found["a/b"].tolist() == [1.0] * 3
    assert (found[1].tolist(), found["1"].tolist()) == ([1.0] * 2, [2.0] * 2)


def _drifted_shards(rank, world_size, folder):
    """Replicas of shards: rank 3's copy of rank 1's shard is another."""
    from echelon.dist.fsdp import fully_shard, shards
    from echelon.dist.mesh import DeviceMesh

    dist.init()
    model = numbered(32, 32)
    fully_shard(model, mesh=DeviceMesh((2, 2), ("replicate", "shard")))
    state = {"model": model}
    save(folder, state)
    shard = shards(model)["0.weight"].data
    if rank == 3:
        with torch.no_grad():
            shard[-1] += 1
    with pytest.raises((ValueError, CheckpointError), match=r"differs between ranks 1 and 3"):
        save(folder, state)
    dist.shutdown()


def test_replicas_of_shards_that_have_drifted_are_refused(tmp_path):
    run_ranks(_drifted_shards, 4, str(tmp_path))
    assert [version.name for version in versions(tmp_path)] == ["000001"]
