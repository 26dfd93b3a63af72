"""Checkpoints of tensors on a device, in the background: the state of the call, not a later one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.fsdp import full_state_dict, fully_shard  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def _model(device):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(300, 300) for _ in range(3)]
    return torch.nn.Sequential(*layers).to(device)


def _background(rank, world_size, folder, device):
    """Work is queued on the device before and after the call; what is saved lies between."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init(timeout_s=120)
    model = _model(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    replica = torch.zeros(2_000_000, device=device)
    for _ in range(3):
        for _ in range(20):
            replica.add_(1.0)
        for parameter in model.parameters():
            parameter.data.add_(1.0)
        pending = save(folder, {"model": model, "replica": replica}, async_op=True)
        wanted = {name: value.cpu() for name, value in full_state_dict(model).items()}
        wanted_replica = float(replica[0])
        with torch.no_grad():
            replica.fill_(-1.0)  # at once: a copy that still runs would see it
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        pending.wait()
        whole, found = _model(device), torch.zeros_like(replica)
        load(folder, {"model": whole, "replica": found})
        for name, value in whole.state_dict().items():
            assert torch.equal(value.cpu(), wanted[name]), name
        assert bool((found == wanted_replica).all())
        replica.fill_(wanted_replica)
    dist.shutdown()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_background_save_holds_the_state_of_the_call(tmp_path, device):
    run_ranks(_background, 2, str(tmp_path), device, timeout_s=180)
