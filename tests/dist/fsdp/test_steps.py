"""Every way through a step: split backwards, computed again, failing, compiled, astray."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.errors import CollectiveError, CollectiveMismatchError, PeerLostError  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def shard(model, **settings):
    from echelon.dist.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def different(model, expected):
    from echelon.dist.fsdp import full_state_dict

    state = full_state_dict(model)
    return [name for name in expected if not torch.equal(state[name], expected[name])]


def _split(rank, size):
    """Inputs' gradients first, weights' later, with and without holding the parameters."""
    from echelon.dist.fsdp import reduce_gradients, reshard, unshard

    models.join()
    expected = models.train_alone(size, 3, micro=2)
    for held in (True, False):
        model = shard(models.make())
        optimizer = models.make_optimizer(model)
        first = model.blocks[0]
        inputs = []
        first.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))  # noqa: B023
        for step in range(3):
            if held:
                unshard(model)
            graphs = []
            for one in range(2):
                index = (step * size + rank) * 2 + one
                graphs.append((models.loss_of(model, index), inputs.pop()))
            for loss, x in graphs:
                (gradient,) = torch.autograd.grad(loss, [x], retain_graph=True)
                assert gradient.abs().sum() > 0
            if not held:
                assert all(p.dim() > 0 and p.numel() for p in first.parameters())
            parameters = list(model.parameters())
            assert sum(p.numel() for p in parameters) == sum(
                p.numel() for p in models.make().parameters()
            )
            for loss, _ in graphs:
                for p, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    p.grad = gradient if p.grad is None else p.grad + gradient
            with pytest.raises(ValueError, match="not reduced"):
                optimizer.step()
            reduce_gradients(model)
            if held:
                with pytest.raises(ValueError, match="call reshard"):
                    optimizer.step()
            reshard(model)
            optimizer.step()
            optimizer.zero_grad()
        assert different(model, expected) == [], held
    dist.shutdown()


def test_a_split_backward_equals_one_process():
    run_ranks(_split, 2)


class Checkpointed(nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def _checkpointed(rank, size):
    from echelon.dist.fsdp import fully_shard, gradient_sync

    models.join()
    expected = models.train_alone(size, 3, micro=2)
    for reentrant in (False, True):
        for outside in (False, True):
            model = models.make()
            for index, block in enumerate(model.blocks):
                if outside:  # the unit is what is computed again
                    model.blocks[index] = Checkpointed(fully_shard(block), reentrant)
                else:
                    model.blocks[index] = fully_shard(Checkpointed(block, reentrant))
            fully_shard(model)
            optimizer = models.make_optimizer(model)
            for step in range(3):
                first = (step * size + rank) * 2
                with gradient_sync(model, enabled=False):
                    models.loss_of(model, first).backward()
                models.loss_of(model, first + 1).backward()
                optimizer.step()
                optimizer.zero_grad()
            renamed = {
                name.replace("blocks.0", "blocks.0.block")
                .replace("blocks.1", "blocks.1.block")
                .replace("blocks.2", "blocks.2.block"): value
                for name, value in expected.items()
            }
            assert different(model, renamed) == [], (reentrant, outside)
    dist.shutdown()


def test_checkpointed_activations_equal_one_process():
    run_ranks(_checkpointed, 2)


class Leaking(nn.Module):
    """Keeps what it computes instead of returning it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        self.kept = self.inner(torch.relu(self.inner(x)))
        return x


def _leaking(rank, size):
    from echelon.dist.fsdp import fully_shard

    models.join()
    model = fully_shard(nn.Sequential(fully_shard(Leaking()), nn.Linear(8, 8)))
    for _ in range(2):
        model(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="at version 10000000"):
            model[0].kept.sum().backward()
    dist.shutdown()


def test_what_leaves_a_unit_by_a_side_door_is_an_error():
    """And not a gradient computed with parameters that are gone."""
    run_ranks(_leaking, 2)


class Failing(nn.Module):
    """Fails in forward or backward when told."""

    def __init__(self):
        super().__init__()
        self.when = ""
        self.failures = 0

    def forward(self, x):
        if self.when == "forward":
            self.failures += 1
            raise FloatingPointError("forward")
        if self.when == "backward" and x.requires_grad:
            x = x * 1
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient):
        self.failures += 1
        raise FloatingPointError("backward")


def _recovering(rank, size):
    models.join()
    expected = models.train_alone(size, 3)
    for kept in (True, False):
        model = models.make()
        failing = [Failing() for _ in model.blocks]
        for block, fault in zip(model.blocks, failing, strict=True):
            block.down = nn.Sequential(block.down, fault)
        shard(model, reshard_after_forward=kept)
        optimizer = models.make_optimizer(model)
        for step in range(3):
            for fault in failing:
                for when in ("forward", "backward"):
                    fault.when = when
                    with pytest.raises(FloatingPointError, match=when):
                        models.loss_of(model, 77 + rank).backward()
                    fault.when = ""
                    optimizer.zero_grad()
            models.loss_of(model, step * size + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [fault.failures for fault in failing] == [6, 6, 6]
        renamed = {name.replace("down", "down.0"): value for name, value in expected.items()}
        assert different(model, renamed) == [], kept
    dist.shutdown()


def test_goes_on_after_an_exception_in_forward_or_backward():
    run_ranks(_recovering, 2)


def _astray(rank, size, way):
    models.join(timeout_s=20.0)
    model = shard(models.make())
    models.loss_of(model, rank).backward()
    if rank == 1 and way == "order":
        blocks = list(model.blocks)
        model.blocks = nn.ModuleList([blocks[0], blocks[2], blocks[1]])
    if rank == 1 and way == "skip":
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])
    with pytest.raises(CollectiveMismatchError, match="while") as caught:
        models.loss_of(model, rank).backward()
    dist.shutdown()
    return list(caught.value.ranks), str(caught.value)


@pytest.mark.parametrize("way", ["order", "skip"])
def test_a_rank_that_goes_another_way_is_named(way):
    ended = run_ranks(_astray, 3, way)
    for ranks, text in ended:
        assert ranks == [1], text
        assert "rank 1" in text
    assert any("unit 'blocks.1'" in text for _, text in ended)


def _dying(rank, size):
    import os

    models.join(timeout_s=20.0)
    model = shard(models.make())
    models.loss_of(model, rank).backward()
    if rank == 1:
        model.blocks[1].register_full_backward_hook(lambda *_: os._exit(9))
    with pytest.raises(PeerLostError, match="rank 1"):
        models.loss_of(model, rank).backward()
    with pytest.raises(CollectiveError, match="rank 1"):  # and stays clear about it
        models.loss_of(model, rank).backward()
    dist.shutdown()


def test_a_rank_that_dies_in_backward_is_named():
    run_ranks(_dying, 3, exit_codes={1: 9})


def _compiled(rank, size):
    from torch._dynamo.utils import counters

    from echelon.dist.fsdp import full_state_dict, fully_shard

    models.join()
    expected = models.train_alone(size, 2)
    ways = {
        "compiled, then sharded": lambda block: fully_shard(torch.compile(block, backend="eager")),
        "sharded, then compiled": lambda b: torch.compile(fully_shard(b), backend="eager"),
        "in place, then sharded": lambda b: b.compile(backend="eager") or fully_shard(b),
    }
    for way, compiled in ways.items():
        torch._dynamo.reset()
        counters.clear()
        model = models.make()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = compiled(block)
        fully_shard(model)
        optimizer = models.make_optimizer(model)
        for step in range(2):
            models.loss_of(model, step * size + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert counters["stats"]["unique_graphs"] == 1, way  # it serves all equal blocks
        assert not counters["graph_break"], way
        state = {n.replace("_orig_mod.", ""): v for n, v in full_state_dict(model).items()}
        assert [n for n in expected if not torch.equal(state[n], expected[n])] == [], way
    dist.shutdown()


def test_compiled_blocks_equal_plain_ones():
    run_ranks(_compiled, 2, timeout_s=120)
