"""The styles, which define how tensor parallelism changes each kind of module.

Splitting a layer does not replace its module, its name or its parameter object. The parameter
becomes this rank's slice, and the module's `forward` is replaced by a function that communicates
with the other ranks. Only plain tensors are used, so `fully_shard`, pipelines and optimizers work
as with any other layer.

Torch's DTensor was tried and rejected for three reasons: `fully_shard` cannot store DTensors in its
flat vectors, torch needs a world in addition to echelon's, and the same layers took 2.3 times as
much CPU time (width 128, 2 ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor, nn

from echelon.dist.fsdp.parameters.slices import Slice, set_slice, slice_of
from echelon.dist.group import ProcessGroup
from echelon.dist.parallel.tensor.collectives import (
    POSITIONS,
    enter,
    gather,
    leave,
    own_positions,
)

FEATURES = -1


@dataclass(frozen=True)
class Setting:
    """The ranks across which layers are split, and whether sequences are split among them, too."""

    group: ProcessGroup
    sequence: bool


def check(name: str, module: nn.Module, style: str, size: int) -> None:
    """Check that a module can be split in a given style. Called before any module is split.

    Raises:
        ValueError: the module cannot be split.
    """
    if style in ("column", "row", "head"):
        linear = _linear(name, module)
        length = linear.in_features if style == "row" else linear.out_features
        if style != "head" and length % size:
            what = "inputs" if style == "row" else "outputs"
            raise ValueError(
                f"{name} has {length} {what}, which cannot be divided evenly among {size} "
                "tensor-parallel ranks"
            )
    elif style in ("vocabulary", "embedding"):
        _embedding(name, module)


def make_region(name: str, module: nn.Module, setting: Setting) -> None:
    """Make a module start a tensor-parallel region: pass its first argument through `enter`."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(
                f"{name} is a region of the plan, so its first positional argument must be a tensor"
            )
        return enter(args[0], setting.group, sequence=setting.sequence), *args[1:]

    module.register_forward_pre_hook(before)


def make_column(name: str, module: nn.Module, setting: Setting, *, enters: bool) -> None:
    """Split a linear layer along its output dimension; make it return only this rank's features."""
    linear = _linear(name, module)
    linear.out_features = _divide_rows(name, linear, setting)
    if not enters:
        return

    def forward(x: Tensor) -> Tensor:
        x = enter(x, setting.group, sequence=setting.sequence)
        return F.linear(x, linear.weight, linear.bias)

    _replace_forward(linear, forward)


def make_row(name: str, module: nn.Module, setting: Setting) -> None:
    """Split a linear layer along its input dimension.

    The outputs are summed over the ranks before the bias is added.
    """
    linear = _linear(name, module)
    linear.in_features = divide(f"{name}.weight", linear.weight, 1, setting.group)

    def forward(x: Tensor) -> Tensor:
        x = leave(F.linear(x, linear.weight), setting.group, sequence=setting.sequence)
        return x if linear.bias is None else x + linear.bias.to(x.dtype)

    _replace_forward(linear, forward)


def make_vocabulary(name: str, module: nn.Module, setting: Setting) -> None:
    """Split an embedding's rows evenly across the ranks, if possible; otherwise leave it whole.

    If the embedding is split, each rank looks up only the tokens whose rows it holds.
    """
    embedding = _embedding(name, module)
    if embedding.num_embeddings % setting.group.size:
        make_embedding(name, module, setting)
        return
    rows = divide(f"{name}.weight", embedding.weight, 0, setting.group)
    first = setting.group.rank * rows
    num_all = embedding.num_embeddings

    def forward(tokens: Tensor) -> Tensor:
        _check_tokens(name, tokens, num_all)
        local = tokens - first
        is_elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(is_elsewhere, 0), embedding.weight)
        x = x.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return leave(x, setting.group, sequence=setting.sequence)

    _replace_forward(embedding, forward)


def make_embedding(name: str, module: nn.Module, setting: Setting) -> None:
    """Leave an embedding whole; if the sequence is split, output only this rank's positions."""
    embedding = _embedding(name, module)
    if setting.sequence:

        def forward(tokens: Tensor) -> Tensor:
            return own_positions(F.embedding(tokens, embedding.weight), setting.group)

        _replace_forward(embedding, forward)


def make_head(name: str, module: nn.Module, setting: Setting) -> None:
    """Split a linear layer evenly along its output dimension, if possible; gather the outputs."""
    linear = _linear(name, module)
    group, sequence = setting.group, setting.sequence
    if linear.out_features % group.size:
        if sequence:

            def whole(x: Tensor) -> Tensor:
                return gather(F.linear(x, linear.weight, linear.bias), group, POSITIONS)

            _replace_forward(linear, whole)
        return
    _divide_rows(name, linear, setting)

    def forward(x: Tensor) -> Tensor:
        x = enter(x, group, sequence=sequence)
        return gather(F.linear(x, linear.weight, linear.bias), group, FEATURES)

    _replace_forward(linear, forward)


def divide(name: str, parameter: Tensor, dim: int, group: ProcessGroup) -> int:
    """Replace a parameter's data with this rank's slice; return the slice's length along `dim`.

    A parameter that several modules share is split only once.

    Raises:
        ValueError: the parameter cannot be split evenly, is already split along another dim, or
            is computed from other parameters.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"{name} is not a parameter but a {type(parameter).__name__}")
    known = slice_of(parameter)
    if known is not None:
        if known.dim != dim:
            raise ValueError(
                f"{name} is already divided along dim {known.dim}, so it cannot be divided along "
                f"dim {dim}"
            )
        return parameter.shape[dim]
    if parameter.shape[dim] % group.size:
        raise ValueError(
            f"{name} has length {parameter.shape[dim]} in dim {dim}, which cannot be divided "
            f"evenly among the {group.size} ranks of tensor-parallel group {group.name!r}"
        )
    part = Slice(tuple(parameter.shape), dim, group.rank, group.size)
    parameter.data = part.of(parameter.data).clone(memory_format=torch.contiguous_format)
    set_slice(parameter, part)
    return parameter.shape[dim]


def _divide_rows(name: str, linear: nn.Linear, setting: Setting) -> int:
    rows = divide(f"{name}.weight", linear.weight, 0, setting.group)
    if linear.bias is not None:
        divide(f"{name}.bias", linear.bias, 0, setting.group)
    return rows


class _Forward:
    """The function that replaces the `forward` method of one split module."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return self._forward(x)

    def __deepcopy__(self, memo: object) -> _Forward:
        """Raise an error, because a copied module would compute with the original's weights."""
        raise ValueError(
            "a model divided by parallelize cannot be copied. Copy the model before "
            "parallelize, and divide the copy, too; for a moving average, keep clones of the "
            "model's parameters"
        )


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.__dict__["forward"] = _Forward(forward)


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(f"{name} must be an nn.Linear to be divided, but is {_described(module)}")
    return module


def _embedding(name: str, module: nn.Module) -> nn.Embedding:
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise ValueError(f"{name} must be an nn.Embedding to be sharded, got {_described(module)}")
    special = ("padding_idx", "max_norm")
    chosen = [one for one in special if getattr(module, one) is not None]
    chosen += [one for one in ("scale_grad_by_freq", "sparse") if getattr(module, one)]
    if chosen:
        raise ValueError(f"{name} has {chosen[0]} set, which tensor parallelism does not support")
    return module


def _described(module: nn.Module) -> str:
    own = "with a forward of its own" if isinstance(module, nn.Linear | nn.Embedding) else ""
    return f"a {type(module).__name__} {own}".strip()


def _check_tokens(name: str, tokens: Tensor, num_all: int) -> None:
    """Check that each token has a row in the embedding. Only host tensors are checked.

    Raises:
        IndexError: a token does not have a row.
    """
    if tokens.device.type == "cpu" and tokens.numel():
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= num_all:
            bad = least if least < 0 else most
            raise IndexError(f"{name}: token {bad} is outside the vocabulary of {num_all} tokens")
