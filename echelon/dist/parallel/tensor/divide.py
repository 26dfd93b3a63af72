"""Split a model's layers according to a plan, and find the parameters that are not split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from echelon.dist.fsdp.parameters.slices import slice_of
from echelon.dist.parallel.plan import Plan, matches
from echelon.dist.parallel.tensor import styles
from echelon.dist.parallel.tensor.styles import Setting


@dataclass(frozen=True)
class Undivided:
    """The parameters that every rank of the group holds in full.

    Attributes:
        partial: parameters for which each rank computes a partial gradient; the partial gradients
            are summed.
        equal: parameters for which every rank computes the full gradient. The gradients are
            averaged, so that the copies remain equal even if a device sums in a nondeterministic
            order.
    """

    partial: tuple[nn.Parameter, ...] = ()
    equal: tuple[nn.Parameter, ...] = ()


def divide_model(model: nn.Module, plan: Plan, setting: Setting) -> Undivided:
    """Split a model's layers across a group's ranks.

    All ranks use the first rank's parameter values. Collective; blocks for at most the group's
    timeout.

    Raises:
        ValueError: the plan or the model does not allow the split. Most of these errors are raised
            before any communication.
        CollectiveError: a rank was lost or did not join.
    """
    _check(model, plan, setting)
    found = list(matches(model, tuple(plan.tensor)))
    for name, module, pattern in found:
        styles.check(name, module, plan.tensor[pattern], setting.group.size)
    _start_equal(model, setting)
    regions = {name for name, _, pattern in found if plan.tensor[pattern] == "region"}
    row_biases: set[int] = set()
    for name, module, pattern in found:
        style = plan.tensor[pattern]
        if style == "region":
            styles.make_region(name, module, setting)
        elif style == "column":
            styles.make_column(name, module, setting, enters=not _is_inside(name, regions))
        elif style == "row":
            styles.make_row(name, module, setting)
            row_biases.update(id(p) for key, p in module.named_parameters() if key == "bias")
        elif style == "vocabulary":
            styles.make_vocabulary(name, module, setting)
        elif style == "embedding":
            styles.make_embedding(name, module, setting)
        else:
            styles.make_head(name, module, setting)
    return _undivided(model, regions, row_biases, setting)


def _check(model: nn.Module, plan: Plan, setting: Setting) -> None:
    size = setting.group.size
    for what, number in plan.divisors.items():
        if number % size:
            raise ValueError(
                f"tensor parallelism over {size} ranks needs {what} to be a multiple of {size}, "
                f"not {number}"
            )
    if not plan.tensor:
        raise ValueError(
            f"the mesh has {size} ranks on axis tp, but the plan does not divide any module: "
            "set plan.tensor"
        )
    dropouts = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    )
    first = next(dropouts, None)
    if first is not None:
        raise ValueError(
            f"{first} drops features at random, and the ranks of axis tp would drop different "
            "features: set its p to 0"
        )


def _start_equal(model: nn.Module, setting: Setting) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                setting.group.broadcast(parameter.detach(), root=0)


def _is_inside(name: str, regions: set[str]) -> bool:
    return any(name.startswith(f"{region}.") for region in regions)


def _undivided(
    model: nn.Module, regions: set[str], row_biases: set[int], setting: Setting
) -> Undivided:
    partial: dict[int, nn.Parameter] = {}
    equal: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if slice_of(parameter) is not None:
            continue
        is_within = _is_inside(name, regions) and id(parameter) not in row_biases
        kind = partial if is_within or setting.sequence else equal
        kind[id(parameter)] = parameter
        if id(parameter) in (equal if kind is partial else partial):
            raise ValueError(
                f"{name} is used both inside and outside a region of the plan, without being "
                "divided: the ranks' gradients would be neither partial sums nor equal"
            )
    return Undivided(tuple(partial.values()), tuple(equal.values()))
