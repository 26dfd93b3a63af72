"""Random small models and random ways to train them, sharded and in one process.

`Program(seed, num_ranks)` draws both: units of random sizes, some within others; weights tied
across units; frozen parameters, some thawed on the way; blocks that are skipped or applied twice,
parts that only some ranks use; the settings of `fully_shard`; and what each step does. `train`
runs it sharded, `train_alone` on one rank with the batches of all, with the sums in the order and
the dtypes that the sharded run promises.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.dist.mesh import DeviceMesh

VOCABULARY = 7
LENGTH = 3


class Branch(nn.Module):
    """A residual branch; `rare` is used on some ranks only, in some steps."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        hidden = draw.choice([2, 5, 16, 40, 90])
        self.norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.Identity()
        self.up = nn.Linear(width, hidden, bias=draw.random() < 0.5)
        self.down = nn.Linear(hidden, width)
        self.rare = nn.Linear(width, width) if draw.random() < 0.3 else None

    def forward(self, x: torch.Tensor, moment: int) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if self.rare is not None and moment % 3 == 0:
            y = y + self.rare(x)
        return x + 0.5 * y


class Nest(nn.Module):
    """Branches one after the other, with a parameter of its own before and after them."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.inner = nn.ModuleList(Branch(draw, width) for _ in range(draw.randint(1, 3)))
        self.shift = nn.Parameter(torch.randn(width) / 8)

    def forward(self, x: torch.Tensor, moment: int) -> torch.Tensor:
        x = x * self.scale
        for one in self.inner:
            x = one(x, moment)
        return x + self.shift


class Model(nn.Module):
    """Token and position, blocks in an order, a head that may be tied to the token.

    Attributes:
        order: the indices of the blocks, as they are applied.
        skipped: blocks that the next forward leaves out.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([8, 12, 20])
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 4)
        kinds = [draw.choice([Branch, Branch, Nest]) for _ in range(draw.randint(2, 5))]
        self.blocks = nn.ModuleList(kind(draw, width) for kind in kinds)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=draw.random() < 0.3)
        self.order = [
            index for index in range(len(kinds)) for _ in range(draw.choice([1, 1, 1, 2]))
        ]
        self.checkpointing = [draw.choice([None, None, False, True]) for _ in kinds]
        self.skipped: set[int] = set()

    def forward(self, ids: torch.Tensor, moment: int) -> torch.Tensor:
        x = self.token(ids) + self.position
        for index in self.order:
            if index in self.skipped:
                continue
            reentrant = self.checkpointing[index]
            if reentrant is None or not torch.is_grad_enabled():
                x = self.blocks[index](x, moment)
            else:
                x = checkpoint(self.blocks[index], x, moment, use_reentrant=reentrant)
        return self.head(self.norm(x))


class Program:
    """One draw. Every rank draws the same.

    Attributes:
        model: whole, with its first values.
        units: paths of modules to shard, inner ones first; several in a list form one unit.
        settings: of `fully_shard`, but for the mesh, which `mesh_shape` says.
        param_dtype, reduce_dtype: None: float32.
        num_micro: batches between two steps of the optimizer.
        habits: what the training loop does besides.
    """

    def __init__(self, seed: int, num_ranks: int, num_steps: int = 30) -> None:
        self.seed, self.num_ranks, self.num_steps = seed, num_ranks, num_steps
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Model(draw)
        self._tie(draw)
        self._freeze(draw)
        self.units = list(self._draw_units(draw))
        self.mesh_shape = (1, num_ranks)
        if num_ranks == 4 and draw.random() < 0.4:
            self.mesh_shape = (2, 2)
        shards = self.mesh_shape[1]
        self.param_dtype, self.reduce_dtype = draw.choice(
            [(None, None)] * 4
            + [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (None, torch.bfloat16)]
        )
        near = [shards // 2] if shards % 2 == 0 else []
        self.settings: dict[str, Any] = {
            "reshard_after_forward": draw.choice([True, True, False, *near]),
            "prefetch": draw.choice([0, 1, 2, 2, 5]),
        }
        self.num_micro = draw.choice([1, 1, 2, 3])
        self.kind = draw.choice([torch.optim.SGD, torch.optim.AdamW])
        names = ["clip", "early", "to_zero", "evaluate", "discard", "joint", "again", "sync_all"]
        self.habits = {name for name in names if draw.random() < 0.25}
        if self.tolerance:  # thirty steps make 1e-5 of a rounding error in float32
            self.param_dtype = self.reduce_dtype = None
            self.model.double()
            self.kind = torch.optim.SGD
        self.thaw_at = draw.choice([None, 7]) if self.frozen else None
        self.skips = [
            {index for index in range(len(self.model.blocks)) if draw.random() < 0.1}
            for _ in range(num_steps)
        ]

    def __repr__(self) -> str:
        dtypes = f"{self.param_dtype}/{self.reduce_dtype}"
        return (
            f"seed {self.seed}: {self.units} mesh {self.mesh_shape} {dtypes} {self.settings} "
            f"order {self.model.order} checkpointing {self.model.checkpointing} micro "
            f"{self.num_micro} {self.kind.__name__} {sorted(self.habits)} thaw {self.thaw_at} "
            f"frozen {sorted(self.frozen)}"
        )

    def _tie(self, draw: random.Random) -> None:
        model = self.model
        if draw.random() < 0.4:
            model.head.weight = model.token.weight
        branches = [one for one in model.modules() if isinstance(one, Branch)]
        for one in branches:
            other = draw.choice(branches)
            if draw.random() < 0.3 and one.up.weight.shape == other.up.weight.shape:
                one.up.weight = other.up.weight
            if draw.random() < 0.3:
                one.down.bias = other.down.bias

    def _freeze(self, draw: random.Random) -> None:
        how = draw.choice(["nothing", "nothing", "some", "blocks"])
        if how == "some":
            for parameter in self.model.parameters():
                parameter.requires_grad_(draw.random() < 0.6)
        elif how == "blocks":
            for part in (self.model.token, *self.model.blocks):
                part.requires_grad_(draw.random() < 0.5)
        self.model.head.requires_grad_()
        self.frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}

    def _draw_units(self, draw: random.Random) -> Iterator[list[str]]:
        alone = [f"blocks.{index}" for index in range(len(self.model.blocks))]
        for path in alone:
            block = self.model.get_submodule(path)
            if isinstance(block, Nest):
                for index in range(len(block.inner)):
                    if draw.random() < 0.5:
                        yield [f"{path}.inner.{index}"]
        if draw.random() < 0.3:
            yield ["token"]
        once = [path for i, path in enumerate(alone) if self.model.order.count(i) == 1]
        if draw.random() < 0.2 and len(once) == len(alone):
            yield ["norm", "head"]
        for path in alone:
            if draw.random() < 0.8:
                yield [path]

    @property
    def tolerance(self) -> float:
        """How far apart the results may be: 0 unless a sum is taken in another order."""
        several = self.num_micro > 1 and self.habits & {"again", "sync_all"}
        in_parts = "clip" in self.habits or several or self._adds_many()
        return 1e-9 if in_parts else 0.0

    def _adds_many(self) -> bool:
        """Whether a parameter is used three times, or twice with a reentrant checkpoint.

        Each such checkpoint is a backward of its own, so its gradients are reduced on their own.
        """
        model = self.model
        uses = collections.Counter(
            id(parameter)
            for index in model.order * (2 if "joint" in self.habits else 1)
            for module in model.blocks[index].modules()
            for parameter in module._parameters.values()
        )
        uses.update([id(model.head.weight), id(model.token.weight)])
        return max(uses.values()) > 2 or any(
            uses[id(parameter)] > 1
            for index, reentrant in enumerate(model.checkpointing)
            if reentrant
            for parameter in model.blocks[index].parameters()
        )

    # ---- what a step does ----

    def steps(self, model: nn.Module) -> Iterator[int]:
        """Yield each step's number, after what changes the model before it."""
        for step in range(self.num_steps):
            if step == self.thaw_at:
                for name, parameter in model.named_parameters():
                    if name.endswith(("weight", "position")):
                        parameter.requires_grad_()
            model.skipped = self.skips[step]
            yield step

    def batch(self, step: int, rank: int, micro: int) -> tuple[torch.Tensor, int]:
        """Return tokens and a number that says which of the rare parts are used."""
        index = (step * self.num_ranks + rank) * self.num_micro + micro
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator), step + rank + micro

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> torch.Tensor:
        ids, moment = self.batch(step, rank, micro)
        logits = _at_least_float32(model(ids, moment))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
        if "joint" in self.habits:  # two forwards, one backward
            again = _at_least_float32(model(ids.flip(0), moment))
            loss = loss + again.square().mean()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        if "again" in self.habits and not any(c is not None for c in self.model.checkpointing):
            loss.backward(retain_graph=True)
        loss.backward()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.kind is torch.optim.SGD else {"weight_decay": 0.1}
        return self.kind(list(parameters), lr=0.02, **options)

    # ---- in one process ----

    def train_alone(self) -> dict[str, torch.Tensor]:
        """Train with the batches of all ranks; return the state after the last step."""
        model = copy.deepcopy(self.model)
        working = copy.deepcopy(model).to(self.param_dtype or self.model.position.dtype)
        optimizer = self.optimizer(model.parameters())
        for step in self.steps(model):
            working.skipped = model.skipped
            totals = self._totals(model, working, step)
            for parameter, total in zip(model.parameters(), totals, strict=True):
                was = parameter.grad if "to_zero" in self.habits else None
                if total is None:
                    parameter.grad = None if was is None else was.zero_()
                else:
                    parameter.grad = total.to(parameter.dtype)
            if "clip" in self.habits:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def _totals(self, model: nn.Module, working: nn.Module, step: int) -> list[Any]:
        """Return the mean over ranks of each parameter's gradient, None where no rank has one."""
        reduce_dtype = self.reduce_dtype or self.param_dtype or self.model.position.dtype
        with torch.no_grad():
            for mine, theirs in zip(working.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
                mine.requires_grad_(theirs.requires_grad)
        by_rank = [
            self._gradients(working, step, rank, reduce_dtype) for rank in range(self.num_ranks)
        ]
        return [self._mean(column, reduce_dtype) for column in zip(*by_rank, strict=True)]

    def _gradients(
        self, working: nn.Module, step: int, rank: int, dtype: torch.dtype
    ) -> list[torch.Tensor | None]:
        parameters = list(working.parameters())
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        working.zero_grad()
        for micro in range(self.num_micro):
            self.backward(self.loss(working, step, rank, micro))
            for index, parameter in enumerate(parameters):
                if dtype == parameter.dtype:
                    sums[index] = parameter.grad
                elif parameter.grad is not None:
                    was, mine = sums[index], parameter.grad
                    total = mine if was is None else was.float() + mine.float()
                    sums[index] = total.to(dtype)
                    parameter.grad = None
        return sums

    def _mean(self, column: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if all(one is None for one in column):
            return None
        some = next(one for one in column if one is not None)
        given = [torch.zeros_like(some) if one is None else one for one in column]
        copies, shards = self.mesh_shape
        rows = [_add(given[row * shards : (row + 1) * shards], dtype) for row in range(copies)]
        if copies == 1:
            return _divide(rows[0], shards, dtype)
        return _add([row.to(dtype) for row in rows], dtype).to(dtype).div(copies * shards)

    # ---- sharded ----

    def train(self, rank: int) -> dict[str, torch.Tensor]:
        """Train with this rank's batches; return the whole state after the last step."""
        from echelon.dist.fsdp import clip_grad_norm_, full_state_dict, gradient_sync

        model = copy.deepcopy(self.model)
        early = self.optimizer(model.parameters())
        self.shard(model)
        optimizer = early if "early" in self.habits else self.optimizer(model.parameters())
        for step in self.steps(model):
            self._look(model, step, rank)
            for micro in range(self.num_micro):
                last = micro == self.num_micro - 1
                with contextlib.ExitStack() as stack:
                    if not last and "sync_all" not in self.habits:
                        stack.enter_context(gradient_sync(model, enabled=False))
                    loss = self.loss(model, step, rank, micro)
                    self.backward(loss)
            if "clip" in self.habits:
                clip_grad_norm_(model, 0.05)
            optimizer.step()
            optimizer.zero_grad(set_to_none="to_zero" not in self.habits)
        return full_state_dict(model)

    def shard(self, model: nn.Module) -> None:
        """Shard a copy of the model."""
        from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = dict(self.settings)
        if self.mesh_shape[0] > 1:
            settings["mesh"] = _mesh(self.mesh_shape)
        if self.param_dtype or self.reduce_dtype:
            settings["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype
            )
        for paths in self.units:
            parts = [model.get_submodule(path) for path in paths]
            fully_shard(parts if len(parts) > 1 else parts[0], **settings)
        fully_shard(model, **settings)

    def _look(self, model: nn.Module, step: int, rank: int) -> None:
        """Run forwards that no training step needs."""
        if "evaluate" in self.habits and step % 3 == 0:
            with torch.no_grad():
                model(*self.batch(step + 1, rank, 0))
        if "discard" in self.habits and step % 4 == 1:
            model(*self.batch(step + 2, rank, 0))


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor


def _add(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Add in rank order: 16-bit floats in float32, rounded once."""
    total = _at_least_float32(parts[0])
    for part in parts[1:]:
        total = total + _at_least_float32(part)
    return total if dtype.itemsize == 2 else total.to(dtype)


def _divide(total: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    return (total / number).to(dtype)


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = DeviceMesh(shape, ("replicate", "shard"))
    return _meshes[shape]
