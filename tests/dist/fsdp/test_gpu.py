"""The same on devices: resized storages, a group's own streams, shards on the host.

Several ranks share one card through the host's engine, so one card is enough; where there are two,
the same runs over nccl. The programs take the device as an argument: one of them runs on the CPU in
every suite, so that what waits for a device is known to run.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
two_gpus = [
    *gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices"),
]
STEPS = 3
# Settings of `fully_shard` as plain values, and how far weights may be from one process in float32.
CASES = {
    "plain": ({}, 1e-5),
    "kept": ({"reshard_after_forward": False}, 1e-5),
    "near": ({"reshard_after_forward": 2}, 1e-5),
    "replicas": ({"is_hsdp": True}, 1e-5),
    "bfloat16": ({"half": torch.bfloat16}, 2e-2),
    "replicas in bfloat16": ({"is_hsdp": True, "half": torch.bfloat16}, 2e-2),
    "offloaded": ({"is_offloaded": True}, 1e-5),
    "offloaded in bfloat16": ({"is_offloaded": True, "half": torch.bfloat16}, 2e-2),
}


def _loss(model, index, device):
    ids, targets = (one.to(device) for one in models.batch(index))
    logits = model(ids).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten())


def _shard(model, *, is_hsdp=False, half=None, is_offloaded=False, **settings):
    """Shard a model into units of very different sizes."""
    from echelon.dist.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if is_hsdp:
        settings["mesh"] = DeviceMesh((2, dist.world().size // 2), ("replicate", "shard"))
    if half is not None:
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        settings["mp_policy"] = policy
    if is_offloaded:
        settings["offload_policy"] = CPUOffloadPolicy()
    first, second, third = model.blocks
    for unit in (first.attention, first, second.up, second, third, model):
        fully_shard(unit, **settings)
    return model


def _check(model, device, rank, size, *, tolerance, is_offloaded):
    """Train, and compare each gradient norm and the weights with one process on the CPU."""
    from echelon.dist.fsdp import clip_grad_norm_, full_state_dict

    optimizer = models.make_optimizer(model)
    expected = models.make()
    plain = models.make_optimizer(expected)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step * size + rank, device).backward()
        norm = clip_grad_norm_(model, float("inf"))
        optimizer.step()
        plain.zero_grad()
        for other in range(size):
            (_loss(expected, step * size + other, "cpu") / size).backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), float("inf"))
        assert norm == pytest.approx(float(plain_norm), rel=10 * tolerance)
        plain.step()
    kinds = {p.device.type for p in model.parameters()}
    assert kinds == {"cpu" if is_offloaded else torch.device(device).type}
    state = full_state_dict(model)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            state[name].cpu(), value, rtol=10 * tolerance, atol=tolerance, msg=name
        )


def _each(rank, size, backend, device, names):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init(backend, timeout_s=120)
    for name in names:
        settings, tolerance = CASES[name]
        model = _shard(models.make().to(device), **settings)
        is_offloaded = settings.get("is_offloaded", False)
        _check(model, device, rank, size, tolerance=tolerance, is_offloaded=is_offloaded)
    dist.shutdown()


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("cpu", ["replicas in bfloat16", "near"]),
        pytest.param("cuda", list(CASES), marks=gpu),
    ],
)
def test_trains_as_one_process_with_four_ranks_on_a_device(device, names):
    """With CUDA all four share a card, or the cards that there are, through the host's engine."""
    run_ranks(_each, 4, None, device, names, timeout_s=300)


@pytest.mark.parametrize("name", [pytest.param(name, marks=two_gpus) for name in CASES])
def test_trains_as_one_process_over_nccl(name):
    is_hsdp = CASES[name][0].get("is_hsdp", False)
    size = 4 if is_hsdp or name == "near" else 2
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} devices")
    run_ranks(_each, size, "nccl", "cuda", [name], timeout_s=120)


def _released(rank, size):
    """A released unit holds no device memory: its storage has no bytes."""
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.fsdp.parameters.unit import unit_of

    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init(timeout_s=120)
    model = models.make().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    storages = [
        unit_of(block).flats[0].full.tensor.untyped_storage()  # type: ignore[union-attr]
        for block in model.blocks
    ]
    for step in range(2):
        assert all(storage.size() == 0 for storage in storages)
        _loss(model, step * size + rank, "cuda").backward()
    assert all(storage.size() == 0 for storage in storages)
    dist.shutdown()


@pytest.mark.parametrize("size", [pytest.param(2, marks=gpu)])
def test_a_released_unit_holds_no_device_memory(size):
    run_ranks(_released, size, timeout_s=120)
