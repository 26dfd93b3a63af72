"""Adapt common torch functions so that they treat shards correctly.

To torch, a shard is an ordinary parameter. Torch's functions would therefore return wrong results,
for example the norm of only one rank's shards. After the first `fully_shard`, the following
functions either handle shards correctly or raise an error:

    torch.nn.utils.clip_grad_norm_      the norm of all ranks' shards (`clipping.clip_grad_norm_`)
    torch.nn.utils.get_total_norm       error for gradients of shards, whose group is unknown
    torch.amp.GradScaler                either all ranks of a unit's groups skip a step, or none do
    torch.autograd.backward             `inputs=` can contain shards (also in `Tensor.backward`);
                                        error under Compiled Autograd
    torch.autograd.grad                 error for shards, because the result would contain only one
                                        rank's gradients
    nn.Module.zero_grad                 also clears unreduced gradients of gathered parameters

For models without shards, torch's original functions are called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.utils.clip_grad as torch_clipping
from torch import nn
from torch.autograd.graph import GradientEdge

from echelon.dist.fsdp.guards.clipping import clip_grad_norm_
from echelon.dist.fsdp.guards.scaler import share_overflow
from echelon.dist.fsdp.parameters.member import is_of_shard, member_of
from echelon.dist.fsdp.uncompiled import uncompiled

_installed = False


def install() -> None:
    """Replace torch functions with versions that handle shards; see this module's docstring."""
    global _installed
    if _installed:
        return
    _installed = True
    module: Any = torch_clipping
    utilities: Any = nn.utils
    # Programs that imported the function earlier reach the guard on what it calls.
    module._get_total_norm = uncompiled(_guarded_total_norm(module._get_total_norm))
    clip = uncompiled(_guarded_clip(module.clip_grad_norm_))
    module.clip_grad_norm_ = utilities.clip_grad_norm_ = clip
    if hasattr(utilities, "get_total_norm"):
        module.get_total_norm = utilities.get_total_norm = module._get_total_norm
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = uncompiled(_guarded_unscale(scaler._unscale_grads_))
    engine: Any = torch.autograd
    engine.backward = uncompiled(_guarded_backward(engine.backward))
    engine.grad = uncompiled(_guarded_grad(engine.grad))
    model: Any = nn.Module
    model.zero_grad = uncompiled(_guarded_zero_grad(model.zero_grad))


def _guarded_clip(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        given = list(parameters)
        if not any(member_of(parameter) is not None for parameter in given):
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite:
            norm = clip_grad_norm_(given, float("inf"), norm_type)
            if not torch.isfinite(torch.tensor(norm)):
                raise RuntimeError(f"gradients with a total norm of {norm} cannot be clipped")
        norm = clip_grad_norm_(given, max_norm, norm_type)
        return torch.tensor(norm, device=given[0].device)

    return clip


def _guarded_total_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(is_of_shard(tensor) for tensor in given):
            raise ValueError(
                "these are gradients of shards, so their norm is only this rank's part of the "
                "total norm; use echelon.dist.fsdp.clip_grad_norm_(model, max_norm), which "
                "returns the total"
            )
        return original(given, *args, **kwargs)

    return total_norm


def _guarded_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale(
        self: Any,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor]
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        shards = [one for one in parameters if member_of(one) is not None]
        if shards:
            mine = any(bool(flag) for flag in found.values())
            shared = share_overflow(mine, shards)
            for device in found or [shards[0].device]:
                found[device] = torch.full_like(found_inf, float(shared), device=device)
        return found

    return unscale


def _guarded_backward(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        given = _inputs(kwargs.get("inputs", args[5] if len(args) > 5 else None))
        if any(member_of(one) is not None for one in given):
            args = args[:5]
            kwargs["inputs"] = [one if (m := member_of(one)) is None else m.leaf for one in given]
        if _autograd_is_compiled():
            _refuse_units(args[0] if args else kwargs.get("tensors"))
        original(*args, **kwargs)

    return backward


def _autograd_is_compiled() -> bool:
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def _refuse_units(roots: Any) -> None:
    """Raise a ValueError if a backward pass under Compiled Autograd would reach a unit.

    Compiled Autograd extracts all saved tensors before the first hook runs. At this point, the unit
    is not yet gathered.
    """
    edges = roots if isinstance(roots, (list, tuple)) else [roots]
    nodes = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in edges]
    seen = {node for node in nodes if node is not None}
    stack = list(seen)
    while stack:
        node = stack.pop()
        member = member_of(getattr(node, "variable", None))
        if member is not None:
            raise ValueError(
                f"Compiled Autograd cannot run a backward pass through {member}, which is sharded: "
                "turn off torch._dynamo.config.compiled_autograd. torch.compile does not need it "
                "to compile the backward pass"
            )
        below = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= below
        stack += below


def _guarded_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _inputs(inputs):
            member = member_of(one)
            if member is not None and one is member.shard:
                raise ValueError(
                    f"torch.autograd.grad cannot yield the gradient of shard {member}: use "
                    "backward(inputs=...), which reduces the gradient into .grad, or "
                    "unshard(model) first"
                )
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _inputs(inputs: Any) -> list[Any]:
    """Return `inputs`, which is a tensor or a sequence or dict of tensors, as a list."""
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _guarded_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for parameter in self.parameters():
            member = member_of(parameter)
            if member is None:
                continue
            member.drop_gradient()
            if set_to_none:
                member.shard.grad = None
            elif member.shard.grad is not None:
                member.shard.grad.zero_()

    return zero_grad
