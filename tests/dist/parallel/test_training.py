"""What else holds of a divided model: its checkpoints, its errors, its precision."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.fsdp import GradScaler, MixedPrecisionPolicy  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from echelon.dist.parallel import Plan, parallelize  # noqa: E402
from echelon.errors import CollectiveError  # noqa: E402
from echelon.train.models import Transformer  # noqa: E402
from tests.dist.parallel.models import loss_of, make_batch, make_model  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def _divided(shape, layout, **options):
    mesh = DeviceMesh(tuple(layout.values()), tuple(layout))
    return parallelize(make_model(shape), mesh, loss_fn=loss_of, **options)


def _train_and_change_layout(rank, size, folder):
    dist.init(timeout_s=240.0)
    one = _divided("gpt2", {"shard": 2, "tp": 2})
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    one.step(*make_batch(0))
    optimizer.step()
    save(folder, {"model": one.model, "optimizer": optimizer})
    whole = one.full_state_dict()
    two = _divided("gpt2", {"pp": 2, "tp": 2}, num_microbatches=2)
    other = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    load(folder, {"model": two.model, "optimizer": other})
    again = two.full_state_dict()
    with torch.device("meta"):
        empty = Transformer(make_model("gpt2").config)
    three = parallelize(empty, DeviceMesh((2, 2), ("replicate", "tp")), loss_fn=loss_of)
    save(f"{folder}-fresh", {"model": three.model})  # refuses copies that differ
    slices = three.model.blocks[0].mlp.up.weight.detach().flatten()[:4].tolist()
    load(folder, {"model": three.model})
    last = three.full_state_dict()
    dist.shutdown()
    return whole, again, last, slices


def test_a_checkpoint_of_one_layout_loads_into_another_and_into_one_process(tmp_path):
    folder = str(tmp_path / "saved")
    results = run_ranks(_train_and_change_layout, 4, folder, timeout_s=240)
    model = make_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model(make_batch(0)[0]), make_batch(0)[1]).backward()
    optimizer.step()
    expected = model.state_dict()
    assert results[0][3] != results[1][3]  # two slices of one random matrix
    for whole, *others, _ in results:
        for other in others:
            assert whole.keys() == other.keys() == expected.keys()
            assert all(torch.equal(whole[name], other[name]) for name in whole)
        assert all(torch.allclose(whole[name], expected[name], atol=1e-5) for name in whole)
    momenta = [optimizer.state[one]["momentum_buffer"].clone() for one in model.parameters()]
    for one in optimizer.state.values():
        one["momentum_buffer"].zero_()
    load(folder, {"model": model, "optimizer": optimizer})
    for name, value in model.state_dict().items():
        assert torch.equal(value, results[0][0][name])
    for one, momentum in zip(model.parameters(), momenta, strict=True):
        assert torch.allclose(optimizer.state[one]["momentum_buffer"], momentum, atol=1e-5)


class _WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(4, 6), nn.Dropout(0.1)


def _be_refused(rank, size):
    world = dist.init(timeout_s=240.0)
    mesh = DeviceMesh((2,), ("tp",))
    texts = []

    def refuse(make, *args, **kwargs):
        with pytest.raises(ValueError, match=r"\w") as caught:
            make(*args, **kwargs)
        texts.append(str(caught.value))

    for changes in ({"heads": 2, "kv_heads": 1}, {"heads": 1, "kv_heads": 1}, {"hidden": 33}):
        refuse(parallelize, make_model("llama", **changes), mesh)
    column = Plan(tensor={"up": "column"})
    refuse(parallelize, nn.Sequential(nn.Linear(4, 6)), mesh)
    refuse(parallelize, nn.Sequential(nn.Linear(4, 6)), mesh, column)
    refuse(parallelize, _WithDropout(), mesh, column)
    refuse(parallelize, make_model("llama"), mesh, Plan())
    refuse(parallelize, make_model("llama"), DeviceMesh((2,), ("shard",)), sequence=True)
    refuse(parallelize, make_model("llama"), DeviceMesh((2,), ("pp",)), Plan())
    refuse(parallelize, make_model("llama"), DeviceMesh((1, 2), ("tp", "shard")))
    refuse(parallelize, make_model("llama"), mesh, num_microbatches=0)
    refuse(Plan, tensor={"up": "columns"})
    parallel = parallelize(make_model("llama"), mesh, sequence=True, loss_fn=loss_of)
    inputs, targets = make_batch(world.rank)
    refuse(parallel.step, inputs, targets)
    inputs, targets = make_batch(0)
    refuse(parallel.step, inputs[:, :7], targets[:, :7])
    refuse(parallel.step, inputs)
    refuse(parallel.evaluate, inputs)
    refuse(copy.deepcopy, parallel.model)
    dist.shutdown()
    return texts


def test_what_does_not_work_is_refused_in_one_line():
    for texts in run_ranks(_be_refused, 2):
        expected = [
            "tensor parallelism over 2 ranks needs kv_heads to be a multiple of 2, not 1",
            "tensor parallelism over 2 ranks needs heads to be a multiple of 2, not 1",
            "tensor parallelism over 2 ranks needs hidden to be a multiple of 2, not 33",
            "Sequential does not have a plan() method: pass plan=",
            "the plan's pattern 'up' matches no module of Sequential",
            "drop drops features at random, and the ranks of axis tp would drop different",
            "the mesh has 2 ranks on axis tp, but the plan does not divide any module: set plan",
            "sequence=True needs at least two ranks on axis tp, along which sequences are split",
            "the mesh has 2 ranks on axis pp, but the plan does not define how to split",
            "the axes of a mesh for parallelize must be among pp, replicate, shard, tp, in this",
            "num_microbatches must be an integer >= 1, got 0",
            "plan.tensor['up'] must be one of region, column, row, vocabulary, embedding, head",
            "ranks 0 and 1 were given different data, but all ranks of axis tp need the same",
            "sequence parallelism cannot divide 7 positions evenly among the 2 ranks of group 'tp'",
            "step() needs targets, because a loss_fn is set",
            "evaluate() needs targets, because a loss_fn is set",
            "a model divided by parallelize cannot be copied",
        ]
        assert len(texts) == len(expected)
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start)
            assert "\n" not in text


class OurError(Exception):
    """What the program itself raises."""


def _fail_in_a_stage(rank, size, folder):
    world = dist.init(timeout_s=600.0)
    parallel = _divided("llama", {"pp": 2, "tp": 2}, num_microbatches=2)
    parallel.step(*make_batch(0))
    if world.rank == 3:

        def fail(*_):
            raise OurError("ours")

        parallel.model.get_submodule("stages.0.blocks.1.mlp").register_forward_pre_hook(fail)
    with pytest.raises(OurError if world.rank == 3 else CollectiveError) as caught:
        parallel.step(*make_batch(1))
    # No rank exits before all have their error, as in a program that catches it.
    Path(folder, str(rank)).touch()
    deadline_s = time.monotonic() + 120
    while len(list(Path(folder).iterdir())) < size:
        assert time.monotonic() < deadline_s, list(Path(folder).iterdir())
        time.sleep(0.01)
    return str(caught.value)


def test_a_rank_that_fails_in_a_stage_ends_the_groups_of_every_axis(tmp_path):
    texts = run_ranks(_fail_in_a_stage, 4, str(tmp_path), timeout_s=240)
    assert texts[3] == "ours"
    assert all("rank 3 failed: OurError: ours" in text for text in texts[:3]), texts


def _train_in_halves(rank, size):
    """bfloat16 in the units, accumulation over two steps, a scaler, and an overflow on one rank."""
    world = dist.init(timeout_s=240.0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallel = _divided("gpt2", {"shard": 2, "tp": 2}, sequence=True, mp_policy=policy)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler = GradScaler(over=world, init_scale=8.0)
    part, count = parallel.data
    norms = []
    for step in range(3):
        inputs, targets = (one.chunk(count)[part] for one in make_batch(step))
        parallel.step(inputs, targets, loss_scale=scaler.get_scale())
        if step == 0:
            continue  # the next step's gradients are added
        if step == 2 and world.rank == 1:
            next(p for p in parallel.parameters() if p.grad is not None).grad.fill_(float("inf"))
        is_finite = scaler.unscale_(optimizer)
        norms.append(parallel.clip_grad_norm_(1e9) if is_finite else -1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scale = scaler.get_scale()
    dist.shutdown()
    return norms, scale


def test_a_scaler_accumulation_and_mixed_precision_hold_for_all_ranks():
    results = run_ranks(_train_in_halves, 4, timeout_s=240)
    model = make_model("gpt2")
    for step in range(2):
        inputs, targets = make_batch(step)
        loss_of(model(inputs), targets).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for norms, scale in results:
        assert norms == [pytest.approx(expected, rel=0.05), -1.0]
        assert norms == results[0][0]
        assert scale == 4.0
