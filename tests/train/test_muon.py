"""Muon: torch's own on one process, and one process on shards."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.train.optimizers import Muon, matrix_groups, orthogonalize  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

_STEPS = 2
_slow = pytest.mark.slow
_RATE = 0.01


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8), (1, 5), (5, 1)])
def test_the_orthogonal_factor_has_singular_values_near_one(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix, 8)
    singular = torch.linalg.svdvals(found)
    assert ((singular > 0.6) & (singular < 1.3)).all()
    turned = left.t() @ found @ right.t()  # diagonal: the same singular vectors
    torch.testing.assert_close(turned, turned.diagonal().abs().diag(), atol=1e-9, rtol=0)
    assert not orthogonalize(torch.zeros(shape)).any()


def _matrices(seed=2):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in ((12, 12), (8, 20), (20, 8))]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "original"])
def test_it_takes_the_steps_of_torchs_muon(nesterov, scale):
    mine, torchs = _matrices(), _matrices()
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    one = Muon(mine, **settings, scale=scale, compute_dtype=torch.bfloat16)
    name = {"rms": "match_rms_adamw", "original": "original"}[scale]
    other = torch.optim.Muon(torchs, **settings, adjust_lr_fn=name)
    for step in range(4):
        torch.manual_seed(step)
        for a, b in zip(mine, torchs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_the_rest_takes_the_steps_of_torchs_adamw():
    mine, torchs = _matrices(), _matrices()
    groups = [
        {"params": mine[:1], "algorithm": "adamw", "lr": 0.03},
        {"params": mine[1:], "algorithm": "adamw", "weight_decay": 0.0},
    ]
    one = Muon(groups, lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    others = [{"params": torchs[:1], "lr": 0.03}, {"params": torchs[1:], "weight_decay": 0.0}]
    other = torch.optim.AdamW(others, lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    for step in range(4):
        torch.manual_seed(step)
        for a, b in zip(mine, torchs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, torchs, strict=True))


def test_parameters_without_a_gradient_stay():
    parameters = _matrices()
    before = [p.detach().clone() for p in parameters]
    optimizer = Muon(parameters)
    parameters[0].grad = torch.ones_like(parameters[0])
    assert optimizer.step(lambda: 7) == 7
    assert not torch.equal(parameters[0], before[0])
    assert all(torch.equal(p, b) for p, b in zip(parameters[1:], before[1:], strict=True))


def _named_groups(model, **settings):
    names = {id(p): name for name, p in model.named_parameters()}
    groups = matrix_groups(model, **settings)
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_hidden_matrices_are_told_from_embeddings_heads_and_vectors():
    model = models.Gpt(depth=1)
    matrices, others, vectors = _named_groups(model)
    parts = ("attention.qkv", "attention.out", "up", "down")
    assert matrices == [f"blocks.0.{part}.weight" for part in parts]
    assert others == ["token.weight", "position.weight"]  # the head is tied to the first
    assert len(vectors) == 4 + 6
    model.head.weight = nn.Parameter(torch.zeros(models.VOCABULARY, models.WIDTH))
    model.blocks[0].up.weight.requires_grad_(False)
    assert _named_groups(model)[:2] == [
        [name for name in matrices if ".up." not in name],
        [*others, "head.weight"],
    ]
    assert "blocks.0.down.weight" in _named_groups(model, not_hidden=["*.down.*"])[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: Muon([nn.Parameter(torch.ones(3))]), r"Muon trains only matrices.*\[3\]"),
        (lambda m: Muon(m, lr=-1.0), "lr must be"),
        (lambda m: Muon(m, momentum=1.0), "momentum"),
        (lambda m: Muon(m, betas=(0.9, 1.0)), "betas"),
        (lambda m: Muon(m, scale="big"), "scale must be one of rms, original"),
        (lambda m: Muon(m, num_iterations=0), "num_iterations"),
        (lambda m: Muon(m, compute_dtype=torch.int8), "compute_dtype"),
        (lambda m: Muon([{"params": m, "algorithm": "sgd"}]), "algorithm must be"),
        (lambda _: orthogonalize(torch.ones(3)), "expected a floating-point matrix"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(_matrices())


def test_a_matrix_that_tensor_parallelism_divides_is_refused():
    from echelon.dist.fsdp.parameters.slices import Slice, set_slice

    matrix = _matrices()[0]
    set_slice(matrix, Slice(shape=(24, 12), dim=0, index=0, count=2))
    with pytest.raises(ValueError, match=r"\[24, 12\] is split across the 2 ranks of axis tp"):
        Muon([matrix])
    Muon([{"params": [matrix], "algorithm": "adamw"}])


# ---- on shards ----


def _optimizer(model):
    """AdamW's eps is large: rounding of gradients that are 0 would else be steps of full size."""
    return Muon(model, lr=_RATE, weight_decay=0.1, eps=1e-3)


def _train(model, optimizer, first, last, rank, size, *, scaler=None):
    """Batches are the world's: each rank takes its part of 12, in micro-batches."""
    from echelon.dist.fsdp import clip_grad_norm_, gradient_sync

    mine = range(rank * 12 // size, (rank + 1) * 12 // size)
    for step in range(first, last):
        for number in mine:
            with gradient_sync(model, enabled=number == mine[-1]):
                loss = models.loss_of(model, step * 12 + number) / len(mine)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def _alone(last=_STEPS):
    model = models.make()
    _train(model, _optimizer(model), 0, last, 0, 1)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _shard(model, mesh=None):
    from echelon.dist.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


_MORE = [pytest.param(2, 1, marks=_slow), pytest.param(2, 2, marks=_slow)]


def _sharded(rank, size, replicas):
    from echelon.dist.fsdp import GradScaler, full_state_dict
    from echelon.dist.mesh import DeviceMesh

    models.join()
    mesh = DeviceMesh((replicas, size // replicas), ("replicate", "shard"))
    model = _shard(models.make(), mesh)
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, _STEPS, rank, size, scaler=GradScaler(1024.0))
    shards = [p.detach().clone() for p in model.parameters()]
    numels = [s["momentum_buffer"].numel() for s in optimizer.state.values() if len(s) == 1]
    state = full_state_dict(model)
    dist.shutdown()
    return state, shards, sum(numels)


def _assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (3, 1), (4, 2), *_MORE])
def test_on_shards_it_trains_as_one_process(size, replicas):
    """With accumulation, clipping and a scaler; momentum is divided as the matrices are."""
    expected = _alone()
    results = run_ranks(_sharded, size, replicas, timeout_s=120)
    matrices = sum(p.numel() for p in matrix_groups(models.make())[0]["params"])
    assert sum(numel for *_, numel in results) == matrices * replicas
    for state, *_ in results:
        _assert_same(state, expected)
    _assert_replicas_are_equal(results, replicas)


def _assert_replicas_are_equal(results, replicas):
    per_replica = len(results) // replicas
    for rank, (_, shards, _) in enumerate(results):
        first = results[rank % per_replica][1]
        assert all(torch.equal(a, b) for a, b in zip(shards, first, strict=True))


def _saved(rank, size, folder):
    from echelon.dist.checkpoint import save

    models.join()
    model = _shard(models.make())
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, 1, rank, size)
    save(folder, {"model": model, "optimizer": optimizer})
    dist.shutdown()


def _resumed(rank, size, folder):
    from echelon.dist.checkpoint import load
    from echelon.dist.fsdp import full_state_dict

    models.join()
    model = _shard(models.make(seed=5))
    optimizer = Muon(model)  # the checkpoint's settings count
    load(folder, {"model": model, "optimizer": optimizer})
    _train(model, optimizer, 1, _STEPS, rank, size)
    state = full_state_dict(model)
    dist.shutdown()
    return state


@pytest.mark.ranks
def test_its_state_is_loaded_by_another_number_of_ranks(tmp_path):
    folder = str(tmp_path / "saved")
    run_ranks(_saved, 2, folder, timeout_s=120)
    expected = _alone()
    for state in run_ranks(_resumed, 3, folder, timeout_s=120):
        _assert_same(state, expected)


def _pipelined(rank, size):
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.pipeline import Pipeline, Stage

    models.join()
    world = dist.world()
    stage, place = divmod(rank, size // 2)
    model = models.make()
    layers = nn.Sequential(model.blocks[0], *([] if stage else [model.blocks[1]]))
    if stage:
        layers = nn.Sequential(model.blocks[2], nn.Linear(models.WIDTH, 5))
        with torch.no_grad():
            for parameter in layers[1].parameters():
                parameter.fill_(0.1)
    group = world.split(stage)
    fully_shard(layers, group=group)
    pipe = Pipeline(
        [Stage(layers, index=stage, num_stages=2)],
        group=world.split(place),
        num_microbatches=2,
        loss_fn=lambda out, y: (out.mean(-1) - y).square().mean(),
    )
    optimizer = Muon(pipe, lr=_RATE, eps=1e-3)
    for step in range(2):
        pipe.step(*_waves(step))
        optimizer.step()
        optimizer.zero_grad()
    from echelon.dist.fsdp import full_state_dict

    state = full_state_dict(layers)
    dist.shutdown()
    return state


def _waves(step):
    torch.manual_seed(step)
    return torch.randn(4, 3, models.WIDTH), torch.randn(4, 3)


@pytest.mark.ranks
def test_stages_of_a_pipeline_take_their_steps_apart():
    model = models.make()
    head = nn.Linear(models.WIDTH, 5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(0.1)
    stages = nn.Sequential(*model.blocks[:2]), nn.Sequential(model.blocks[2], head)
    optimizer = Muon(nn.ModuleList(stages), lr=_RATE, eps=1e-3)
    for step in range(2):
        for x, y in zip(*(part.chunk(2) for part in _waves(step)), strict=True):
            loss = (stages[1](stages[0](x)).mean(-1) - y).square().mean()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(_pipelined, 4, timeout_s=120)
    for rank, state in enumerate(results):
        _assert_same(state, stages[rank // 2].state_dict())


def _skipped(rank, size):
    """One rank's overflow: every rank skips, and no rank waits in an exchange."""
    from echelon.dist.fsdp import GradScaler

    models.join()
    model = _shard(models.make())
    optimizer = _optimizer(model)
    scaler = GradScaler(1024.0)
    story = []
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(models.loss_of(model, rank)).backward()
        if rank == 1 and step == 1:
            next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = model.parameters()
        story.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    dist.shutdown()
    return story


@pytest.mark.ranks
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(_skipped, 2, timeout_s=120) == [[True, False, True]] * 2


def _divided(rank, size, layout, options):
    """Matrices divided by heads and features, and each slice in shards."""
    from echelon.dist.mesh import DeviceMesh
    from echelon.dist.parallel import parallelize
    from tests.dist.parallel.models import loss_of, make_batch, make_model

    models.join()
    mesh = DeviceMesh(tuple(layout.values()), tuple(layout))
    parallel = parallelize(make_model("llama"), mesh, loss_fn=loss_of, **options)
    with pytest.raises(
        ValueError, match=r"split across the 2 ranks of axis tp: pass tensor_group="
    ):
        Muon(parallel.model)
    tensor = mesh.group("tp")
    optimizers = [Muon(parallel.model, tensor_group=tensor, **_WITH_TP), Muon(parallel, **_WITH_TP)]
    optimizer = optimizers[rank % 2]  # the same, said otherwise
    place, num = parallel.data
    for step in range(_STEPS):
        tokens, targets = (part.tensor_split(num)[place] for part in make_batch(step))
        parallel.step(tokens, targets)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = parallel.full_state_dict()
    momenta = [one["momentum_buffer"].numel() for one in optimizer.state.values() if len(one) == 1]
    dist.shutdown()
    return state, sum(momenta)


_WITH_TP = {"lr": _RATE, "weight_decay": 0.1, "eps": 1e-3}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"shard": 2, "tp": 2}, {"sequence": True}),
        pytest.param({"tp": 2}, {}, marks=_slow),
        pytest.param({"replicate": 2, "tp": 2}, {}, marks=_slow),
        pytest.param({"pp": 2, "tp": 2}, {"num_microbatches": 2}, marks=_slow),
        pytest.param({"replicate": 2, "shard": 2, "tp": 2}, {}, marks=_slow),
    ],
)
def test_under_tensor_parallelism_it_trains_as_one_process(layout, options):
    """Momentum stays divided: each rank keeps its part of each slice."""
    from echelon.dist.fsdp import clip_grad_norm_
    from tests.dist.parallel.models import loss_of, make_batch, make_model

    model = make_model("llama")
    optimizer = Muon(model, **_WITH_TP)
    for step in range(_STEPS):
        tokens, targets = make_batch(step)
        loss_of(model(tokens), targets).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(_divided, math.prod(layout.values()), layout, options, timeout_s=120)
    for state, _ in results:
        _assert_same(state, model.state_dict())
    matrices = sum(p.numel() for p in matrix_groups(model)[0]["params"])
    assert sum(numel for _, numel in results) == matrices * layout.get("replicate", 1)
