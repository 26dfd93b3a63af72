"""Check that an optimizer is elementwise and therefore works on shards.

An optimizer that treats each element independently (SGD, Adam, ...) gives the same result on shards
as on unsharded parameters. An optimizer that uses a parameter's shape, rows or norms (Muon,
Adafactor, LAMB, ...) would silently compute wrong results. Every optimizer is therefore checked
before its first step on shards. This module knows which of torch's own optimizers are elementwise,
and tests all others on a small parameter. A class that assembles full parameters itself sets the
attribute `handles_shards = True` (see `echelon.train.optimizers.Muon`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.unit import Unit, owner_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.fsdp.uncompiled import uncompiled

_ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta"}
    | {"ASGD"}
)
_NOT_ELEMENTWISE = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_installed = False


def install() -> None:
    """Install a hook that checks every optimizer before it takes a step on shards."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(uncompiled(_before_step))
        _installed = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    units: dict[Unit, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = member_of(parameter)
            if member is not None:
                _check_parameter(parameter, member.shard)
                units[owner_of(member)] = None
    if not units:
        return
    if optimizer not in _checked:
        _check_optimizer(optimizer)
        _checked.add(optimizer)
    for unit in units:
        unit.check_step()
        driver_of(unit).release([unit])


def _check_parameter(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    if parameter is not shard:
        raise ValueError(
            "this optimizer was created while the model was unsharded: create it before the first "
            "forward, or after reshard()"
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raise a ValueError unless the optimizer is elementwise."""
    kind = type(optimizer)
    if getattr(kind, "handles_shards", False) is True:
        return
    if kind.__module__.startswith("torch.optim"):
        if kind.__name__ in _ELEMENTWISE:
            return
        known = kind.__name__ in _NOT_ELEMENTWISE
    else:
        known = False
    if known or not is_elementwise(optimizer):
        raise ValueError(
            f"{kind.__name__} is not elementwise, so it cannot work on "
            "shards, which are ranges of a parameter's elements. Use an elementwise optimizer "
            "(SGD, Adam, AdamW, ...) or echelon.train.optimizers.Muon, or pass the parameters "
            "that this optimizer trains to fully_shard(..., ignored_params=...)"
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class gives the same results on shards as on full parameters.

    The class is tested on a small parameter. If the test cannot run, the function returns False.
    """
    generator = torch.Generator().manual_seed(7)
    values = torch.rand(6, 4, generator=generator) + 0.5
    gradients = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    options = {key: value for key, value in optimizer.defaults.items() if key != "fused"}
    try:
        whole = _train(type(optimizer), options, [values], [[one] for one in gradients])
        pieces = _train(type(optimizer), options, _cut(values), [_cut(one) for one in gradients])
    except Exception:  # noqa: BLE001 -- a stranger's optimizer may raise anything
        return False
    return torch.equal(torch.cat([piece.flatten() for piece in pieces]), whole[0].flatten())


def _cut(matrix: torch.Tensor) -> list[torch.Tensor]:
    flat = matrix.flatten()
    return [flat[:5].view(5, 1), flat[5:19].view(14, 1), flat[19:].view(5, 1)]


def _train(
    kind: Any,
    options: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
