"""DTensors, however they are placed: saved by one layout, loaded by another, or whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import newest, read_manifest  # noqa: E402
from echelon.dist.checkpoint.disk.pattern import Pattern, pattern_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=4, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_a_pattern_names_the_elements_of_a_box_in_order(shape, cuts):
    box = [
        np.arange(size)[first % size : first % size + length]
        for size, (first, length) in zip(shape, cuts, strict=False)
    ]
    elements = np.arange(np.prod(shape)).reshape(shape)[np.ix_(*box)].reshape(-1)
    pattern = pattern_of(shape, box)
    starts = pattern.starts()
    named = (starts[:, None] + np.arange(pattern.length)).reshape(-1)
    assert named.tolist() == elements.tolist()
    assert pattern.numel == elements.size
    assert starts.size == 1 or (np.diff(starts) > pattern.length).all()  # no shorter way


def test_indices_without_a_rhythm_are_refused():
    with pytest.raises(ValueError, match="not evenly spaced"):
        pattern_of([8], [np.array([0, 1, 3, 4, 7])])
    strided = pattern_of([8, 2], [np.array([0, 1, 4, 5]), np.arange(2)])
    assert strided == Pattern(0, 4, ((2, 8),))


PLACEMENTS = {
    "columns": lambda t: [t.Replicate(), t.Shard(1)],
    "rows": lambda t: [t.Shard(0), t.Replicate()],
    "both": lambda t: [t.Shard(0), t.Shard(1)],
    "rows twice": lambda t: [t.Shard(0), t.Shard(0)],
    "last": lambda t: [t.Shard(2), t.Shard(1)],
    "nowhere": lambda t: [t.Replicate(), t.Replicate()],
}


def _layouts(rank, world_size, folder):
    import torch.distributed as torch_dist
    from torch.distributed import tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    torch_dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    placed = {
        name: dtensor.distribute_tensor(whole, mesh, make(dtensor))
        for name, make in PLACEMENTS.items()
    }
    save(folder, {"t": placed})
    for first in PLACEMENTS:  # every layout from every other
        order = [*PLACEMENTS]
        turned = order[order.index(first) :] + order[: order.index(first)]
        wanted = {
            name: dtensor.distribute_tensor(torch.zeros_like(whole), mesh, PLACEMENTS[how](dtensor))
            for name, how in zip(order, turned, strict=True)
        }
        load(folder, {"t": wanted})
        for name, value in wanted.items():
            assert torch.equal(value.full_tensor(), whole), (name, value.placements)
    partial = dtensor.DTensor.from_local(whole, mesh, [dtensor.Partial(), dtensor.Replicate()])
    try:
        save(folder + "/partial", {"t": partial})
    except ValueError as error:
        complaint = str(error)
    torch_dist.destroy_process_group()
    return complaint


def test_a_dtensor_of_any_layout_is_saved_and_loaded_into_any_other(tmp_path):
    complaints = run_ranks(_layouts, 4, str(tmp_path), timeout_s=90.0)
    assert all("partial sums" in text for text in complaints)
    whole = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    found = load(tmp_path, {"t": dict.fromkeys(PLACEMENTS)})["t"]
    for name, value in found.items():
        assert np.array_equal(value.numpy(), whole), name
    manifest = read_manifest(newest(tmp_path))
    stored = sum(file.num_bytes for file in manifest.files.values())
    assert stored == len(PLACEMENTS) * whole.nbytes  # replicas once


def _two_dims(rank, world_size, folder):
    """Tensor parallelism, by columns and by rows, under FSDP2, with an optimizer."""
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch_dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build(0)
    for _ in range(2):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder, {"model": model, "optimizer": optimizer})
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    other, theirs = build(1)
    load(folder, {"model": other, "optimizer": theirs})
    for name, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), full[name]), name
    again = [state["exp_avg"].full_tensor() for state in theirs.state.values()]
    assert all(map(torch.equal, again, moments))
    torch_dist.destroy_process_group()
    return {name: value.numpy() for name, value in full.items()}


def test_tensor_parallel_layers_under_fsdp2_load_into_one_process(tmp_path):
    full = run_ranks(_two_dims, 4, str(tmp_path), timeout_s=90.0)[0]
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path, {"model": model, "optimizer": optimizer})
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), full[name]), name
    assert all(state["exp_avg"].abs().sum() > 0 for state in optimizer.state.values())


def test_a_manifest_with_a_monstrous_pattern_is_refused(tmp_path):
    from echelon.dist.checkpoint.disk.manifest import (
        Manifest,
        Range,
        StoredFile,
        StoredTensor,
        decode,
        encode,
    )

    for pattern in (((1 << 40, 1),), ((2, 1 << 40),), ((0, 4),)):
        ranges = (Range(0, 0, 0, 1, pattern),)
        manifest = Manifest(
            world_size=1,
            tensors={"t": StoredTensor((1 << 20, 4), "float32", ranges)},
            files={0: StoredFile("a.bin", 40, (0,))},
        )
        with pytest.raises(ValueError, match="t: a range lies outside"):
            decode(encode(manifest))
