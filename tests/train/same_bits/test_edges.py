"""What SameBits refuses, finds and survives: bad settings, other bits, ranks with nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.analysis.cli import main as analyze  # noqa: E402
from echelon.dist.canonical import Run  # noqa: E402
from echelon.dist.fsdp.parameters.unit import units_of  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage  # noqa: E402
from echelon.errors import NotReproducibleError  # noqa: E402
from echelon.train.optimizers.muon import Muon  # noqa: E402
from echelon.train.same_bits import (  # noqa: E402
    SameBits,
    SameBitsPipeline,
    fingerprint,
    micro_batch_random,
    micro_batch_seed,
)
from echelon.train.same_bits.gradients import _Sums  # noqa: E402
from echelon.train.same_bits.micro_random import continued_random, random_state  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.train.same_bits import model as made  # noqa: E402

ONE = {"rank": 0, "world_size": 1}


def _same(model, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"micro_batches": 3, "seed": 7} | settings
    return SameBits(model, optimizer, **settings), optimizer


def _compute(model, step=0, total=3):
    return lambda number: made.loss_of(model, step, number, total)


def test_random_numbers_belong_to_the_micro_batch_and_the_generator_is_restored():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    drawn = []
    for key in [(0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2)]:
        with micro_batch_random(*key):
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert all(not torch.equal(drawn[0], other) for other in drawn[2:])
    assert torch.equal(torch.get_rng_state(), before)
    assert micro_batch_seed(0, 1, 2) == 6895709204078334967


def test_random_numbers_continue_from_a_state_inside_a_message():
    """Torch itself reads a state that begins inside a storage from the storage's start."""
    torch.manual_seed(1)
    torch.rand(3)
    state = torch.get_rng_state()
    wanted, after = torch.rand(4), torch.rand(4)
    message = torch.cat([torch.full((64,), 255, dtype=torch.uint8), state])
    torch.set_rng_state(state)
    with continued_random(message[64:], torch.device("cpu")):
        assert torch.equal(torch.rand(4), wanted)
        left = random_state(torch.device("cpu"))
    assert torch.equal(torch.rand(4), wanted)  # restored
    with continued_random(left, torch.device("cpu")):
        assert torch.equal(torch.rand(4), after)


def test_an_absent_gradient_counts_as_zeros_wherever_a_run_ends():
    sums = _Sums(Run(0, 2, 2), 3)
    sums.add(1, [None, torch.tensor([-0.0]), None])
    sums.add(0, [torch.tensor([-0.0]), None, None])
    ((_, (left, right, absent)),) = sums.nodes
    assert not torch.signbit(left).any()
    assert not torch.signbit(right).any()
    assert absent is None
    assert sums.present() == [True, True, False]


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init("shm")
    yield
    dist.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_fused_optimizer_is_refused():
    model = made.make()
    with pytest.raises(ValueError, match=r"AdamW\(fused=True\)"):
        SameBits(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batches=2)


@pytest.mark.usefixtures("alone")
def test_what_is_not_covered_is_refused():
    model = made.make()
    with pytest.raises(ValueError, match="does not support Muon"):
        SameBits(model, Muon([nn.Parameter(torch.ones(4, 4))]), micro_batches=2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), **ONE)
    try:
        with pytest.raises(ValueError, match="pass the module inside it"):
            _same(DistributedDataParallel(model))
        mesh = init_device_mesh("cpu", (1,))
        divided = nn.Linear(4, 4)
        divided.weight = nn.Parameter(distribute_tensor(divided.weight, mesh, [Replicate()]))
        with pytest.raises(ValueError, match=r"parameter 'weight' is a DTensor"):
            _same(divided)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_arguments_that_do_not_fit_are_refused():
    model = made.make()
    for settings in ({"micro_batches": 0}, {"run": Run(0, 2, 2)}, {"run": Run(0, 2, 3)}):
        with pytest.raises(ValueError, match=r"at least 1|must cover exactly 3 micro-batches"):
            _same(model, **settings)
    same, _ = _same(model)
    with pytest.raises(ValueError, match="must be >= 0"):
        same.clip_grad_norm_(float("nan"))
    with pytest.raises(ValueError, match="got 2 values, but this rank has 3"):
        same.mean([1.0, 2.0])
    with pytest.raises(ValueError, match="a scalar loss"):
        same.backward(0, lambda _: torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="requires a gradient"):
        _same(made.make().requires_grad_(False))


@pytest.mark.usefixtures("alone")
def test_a_buffer_that_a_forward_changes_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    same, _ = _same(model)
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"changed buffer '1\.num_batches_tracked'"):
        same.backward(0, lambda number: model(x * (number + 1)).square().mean())


@pytest.mark.usefixtures("alone")
def test_a_computation_that_depends_on_how_often_it_is_called_is_found():
    model, calls = made.make(), []

    def compute(number):
        calls.append(number)
        return made.loss_of(model, 0, number, 3) * (1 + len(calls))

    same, _ = _same(model)
    with pytest.raises(NotReproducibleError, match="when rank 0 computed it again"):
        same.backward(0, compute)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert calls == [0, 2, 0]


@pytest.mark.usefixtures("alone")
def test_a_collective_in_a_micro_batch_is_refused():
    model = made.make()
    same, _ = _same(model)

    def compute(number):
        loss = made.loss_of(model, 0, number, 3)
        dist.world().all_reduce(torch.ones(1))
        return loss

    with pytest.raises(ValueError, match="called a collective of group 'world'"):
        same.backward(0, compute)


@pytest.mark.usefixtures("alone")
def test_a_pipeline_that_is_not_covered_is_refused():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    stages = [Stage(layer, index=place, num_stages=2) for place, layer in enumerate(layers)]
    settings = {"schedule": "interleaved_1f1b", "num_microbatches": 2, "loss_fn": nn.MSELoss()}
    optimizer = torch.optim.SGD([one for layer in layers for one in layer.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"the Pipeline has no replicas: pass replicas="):
        SameBitsPipeline(Pipeline(stages, **settings), optimizer, micro_batches=2)
    tied = Pipeline(stages, ties=[["0:weight", "1:weight"]], replicas=dist.world(), **settings)
    with pytest.raises(ValueError, match="does not support tied parameters"):
        SameBitsPipeline(tied, optimizer, micro_batches=2)
    pipe = Pipeline(stages, replicas=dist.world(), **settings)
    with pytest.raises(ValueError, match="num_microbatches=2, but"):
        SameBitsPipeline(pipe, optimizer, micro_batches=3)
    same = SameBitsPipeline(pipe, optimizer, micro_batches=2)
    same.backward(0, lambda number: (torch.ones(2, 3) * number, torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="two stages have a parameter or buffer named 'bias'"):
        same.clip_grad_norm_(1.0)


@pytest.mark.usefixtures("alone")
def test_a_gradient_is_the_average_and_a_parameter_without_one_keeps_none():
    model = made.make()
    same, _ = _same(model)
    loss = same.backward(0, _compute(model))
    losses, wanted = [], {name: 0.0 for name, _ in model.named_parameters()}
    for number in range(3):
        with micro_batch_random(7, 0, number):
            one = made.loss_of(model, 0, number, 3)
            found = torch.autograd.grad(one, list(model.parameters()), allow_unused=True)
        losses.append(one.item())
        for name, gradient in zip(wanted, found, strict=True):
            wanted[name] = wanted[name] + (0.0 if gradient is None else gradient / 3)
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-12)
    assert model.unused.grad is None
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name])
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    assert same.clip_grad_norm_(float("inf")) == pytest.approx(sum(squares).sqrt().item())


def _parting(rank, folder, group):
    """Record three runs: two equal ones, and one whose second step has other data."""
    for index in range(3):
        model = made.shard(made.make(), "sharded", group)
        same, optimizer = _same(model, fingerprints=f"{folder}/{index}/fingerprints")
        for step in range(2):
            shift = 10 if index == 2 and step == 1 else 0
            same.backward(step, lambda n, at=step + shift: made.loss_of(model, at, n, 3))  # noqa: B023
            same.clip_grad_norm_(1.0)
            optimizer.step()


def _on_two_ranks(rank, size, folder):
    group = dist.init("shm", timeout_s=60)
    _parting(rank, folder, group)
    model = made.make()
    same, _ = _same(model)
    with pytest.raises(NotReproducibleError, match="on rank 1 than on rank 0") as caught:
        same.backward(0, lambda n: made.loss_of(model, 0, n, 3) * (1 + rank))
    assert caught.value.ranks == (1,)
    model = made.shard(made.make(), "sharded", group)
    same, optimizer = _same(model)
    with pytest.raises(ZeroDivisionError):
        same.backward(0, lambda _: 1 / 0)
    same.backward(0, _compute(model))  # and goes on as if nothing had happened
    optimizer.step()
    one = fingerprint(model, optimizer)
    model = made.shard(made.make(), "sharded", group)
    run = Run(0, 3, 3) if rank == 0 else Run(3, 3, 3)  # rank 1 has nothing
    same, optimizer = _same(model, run=run)
    same.backward(0, _compute(model))
    optimizer.step()
    assert fingerprint(model, optimizer) == one
    dist.shutdown()
    return one


@pytest.mark.ranks
def test_on_two_ranks(tmp_path, capsys):
    ends = run_ranks(_on_two_ranks, 2, str(tmp_path), timeout_s=60)
    assert ends[0] == ends[1]
    assert analyze(["--compare", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "the same bits in 6 micro-batches of steps 0 to 1" in capsys.readouterr().out
    assert analyze(["--compare", str(tmp_path / "0"), str(tmp_path / "2")]) == 1
    assert "the runs diverge at step 1, micro-batch 0: the loss, and" in capsys.readouterr().out


@pytest.mark.usefixtures("alone")
def test_gathered_memory_is_kept_for_the_next_step_and_returned_by_other_uses():
    """Pages that were returned to the system read as zeros."""
    model = made.shard(made.make(), "sharded", dist.world())
    wholes = [flat.full.tensor for unit in units_of(model) for flat in unit.flats]
    same, _ = _same(model)
    same.backward(0, _compute(model))
    assert all(whole.count_nonzero() for whole in wholes)
    with torch.no_grad():
        made.loss_of(model, 0, 0, 3)
    assert not any(whole.count_nonzero() for whole in wholes)
    same.backward(1, _compute(model))
    with pytest.raises(ValueError, match="a scalar loss"):
        same.backward(2, lambda _: torch.ones(2))
    assert not any(whole.count_nonzero() for whole in wholes)


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_trains_later_is_named():
    model = made.make()
    model.seldom.requires_grad_(False)
    same, _ = _same(model)
    model.seldom.requires_grad_(True)
    with pytest.raises(ValueError, match="'seldom' did not require gradients"):
        same.backward(0, _compute(model))


def _short(rank, size, layout):
    """Parameters in bfloat16, and bfloat16 beside float32 shards."""
    group = dist.init("shm", timeout_s=60)
    prints = []
    model = made.shard(made.make(dtype=torch.bfloat16), layout, group)
    same, optimizer = _same(model, micro_batches=5)
    for step in range(4):
        same.backward(step, _compute(model, step, 5))
        same.clip_grad_norm_(0.1)
        optimizer.step()
    prints.append(fingerprint(model, optimizer))
    if layout == "sharded":
        from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

        model = fully_shard(made.make(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        same, optimizer = _same(model, micro_batches=5)
        for step in range(4):
            same.backward(step, _compute(model, step, 5))
            optimizer.step()
        prints.append(fingerprint(model, optimizer))
    dist.shutdown()
    return prints


@pytest.mark.ranks
@pytest.mark.slow
def test_in_bfloat16():
    plain = run_ranks(_short, 1, "replicated", timeout_s=60)[0]
    alone = run_ranks(_short, 1, "sharded", timeout_s=60)[0]
    ends = run_ranks(_short, 3, "sharded", timeout_s=60)
    assert ends == [alone] * 3
    assert plain == alone[:1]
