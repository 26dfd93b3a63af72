"""Classify a model's parameters for optimizers that treat hidden matrices separately."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.slices import slice_of

# By name too, because the last stage of a pipeline has a head but no embedding of the same shape.
NOT_HIDDEN = (
    "*head.weight",
    "output.weight",
    "*embed*",
    "*wte.*",
    "*wpe.*",
    "token.*",
    "position.*",
)


def matrix_groups(
    model: nn.Module | Any, *, not_hidden: Sequence[str] = NOT_HIDDEN
) -> list[dict[str, Any]]:
    """Split a model's parameters into three groups for `Muon`.

    Muon trains the hidden matrices. AdamW trains the embeddings, the output head and all parameters
    that do not have exactly two dims. Vectors (biases, norms) are trained without weight decay. The
    classification depends only on names, full shapes and module types, so every layout of the model
    gives the same groups. A group can be empty, for example in a pipeline stage.

    Args:
        model: a module (sharded or not), a pipeline, or the result of `parallelize`.
        not_hidden: patterns (`fnmatch`) of the names of matrices that AdamW should train. AdamW
            always trains the matrices of `nn.Embedding` and the matrices tied to them.

    Returns:
        Three parameter groups: the matrices, the other parameters, and the vectors.

    Example:
        >>> for group in matrix_groups(model):
        ...     print(group["algorithm"], len(group["params"]))
        muon 14
        adamw 2
        adamw 5
    """
    module = _module_of(model)
    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace("_orig_mod.", ""))
        parameters[id(parameter)] = parameter
    groups: tuple[list[nn.Parameter], ...] = ([], [], [])
    for key, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        num_dims = len(whole_shape(parameter))
        named = any(fnmatchcase(name, one) for name in names[key] for one in not_hidden)
        is_hidden = num_dims == 2 and key not in embeddings and not named
        groups[0 if is_hidden else 1 if num_dims >= 2 else 2].append(_owner(parameter))
    return [
        {"params": groups[0], "algorithm": "muon"},
        {"params": groups[1], "algorithm": "adamw"},
        {"params": groups[2], "algorithm": "adamw", "weight_decay": 0.0},
    ]


def _module_of(model: nn.Module | Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    found: nn.Module = model.module if hasattr(model, "module") else model.model
    return found


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the full parameter, even if `parameter` is a shard or a slice."""
    part, member = slice_of(parameter), member_of(parameter)
    if part is not None:
        return part.shape
    return tuple(parameter.shape) if member is None else member.piece.shape


def _owner(parameter: nn.Parameter) -> nn.Parameter:
    member = member_of(parameter)
    return parameter if member is None else member.shard
