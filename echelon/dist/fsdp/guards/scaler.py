"""Scale the loss for float16, with the same scale on all ranks.

Gradients below 6e-8 become zero in float16. The loss is therefore multiplied by a large scale
before backward, and the gradients are divided by the scale after backward. If gradients overflow,
the step is skipped and the scale is reduced. An overflow often occurs on only one rank. All ranks
that hold parameters therefore combine their overflow flags, so that they skip the same steps and
use the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from echelon.dist.fsdp.guards.clipping import groups_of, largest
from echelon.dist.fsdp.parameters.member import Member, member_of
from echelon.dist.group import ProcessGroup

T = TypeVar("T", bound="torch.Tensor | list[torch.Tensor]")


class GradScaler:
    """A scaler whose loss scale grows while gradients are finite and shrinks on overflow.

    The methods are those of `torch.amp.GradScaler`, and must be called in the same order. The
    scaler's state is the same on all ranks, and the scaler can be saved in a checkpoint.

    Args:
        init_scale: the initial scale.
        growth_factor: the factor by which the scale grows.
        backoff_factor: the factor by which the scale is multiplied after an overflow.
        growth_interval: the number of consecutive finite steps before the scale grows.
        over: a group of all ranks that hold any of the model's parameters, including those of other
            pipeline stages, experts and replicas. None means the ranks that hold the optimizer's
            parameters.
        enabled: whether to scale. If False, the scaler changes nothing and skips no steps.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> scaler = GradScaler()
        >>> scaler.scale(loss_fn(model(tokens), targets)).backward()
        >>> _ = scaler.unscale_(optimizer)  # before clipping; otherwise step() does it
        >>> norm = clip_grad_norm_(model, 1.0)
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        over: ProcessGroup | None = None,
        enabled: bool = True,
    ) -> None:
        if not (init_scale > 0 and math.isfinite(init_scale)):
            raise ValueError(f"init_scale must be positive and finite, got {init_scale!r}")
        if not growth_factor >= 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1:
            raise ValueError(
                "growth_factor must be >= 1, backoff_factor between 0 and 1, and "
                f"growth_interval >= 1; got {growth_factor!r}, {backoff_factor!r} and "
                f"{growth_interval!r}"
            )
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.enabled = enabled
        self._over = over
        self._scale = float(init_scale)
        self._num_finite = 0  # steps since the scale changed
        self._overflowed: dict[int, bool] = {}  # by the id of each optimizer unscaled in this step

    def get_scale(self) -> float:
        """Return the loss scale, or 1.0 if the scaler is disabled."""
        return self._scale if self.enabled else 1.0

    def scale(self, outputs: T) -> T:
        """Multiply one or more losses by the scale."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, list):
            return [one * self._scale for one in outputs]  # type: ignore[return-value]
        return outputs * self._scale  # type: ignore[return-value]

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide an optimizer's gradients by the scale in place, and check for overflows.

        Collective among the ranks of `over` or, by default, all ranks that hold parameters. The
        method synchronizes with the device once.

        Returns:
            Whether all gradients are finite on all ranks.

        Raises:
            ValueError: the method was called twice in one step, or a gradient is float16.
            CollectiveError: a rank was lost or did not join.
        """
        if not self.enabled:
            return True
        if id(optimizer) in self._overflowed:
            raise ValueError(
                "unscale_() has already been called for this optimizer since the last update()"
            )
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in parameters if one.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "gradients are float16: keep parameters in float32, and compute in float16 "
                "with MixedPrecisionPolicy(param_dtype=torch.float16, "
                "reduce_dtype=torch.float32) or with torch.autocast"
            )
        overflow = _unscale(gradients, 1.0 / self._scale)
        overflow = share_overflow(overflow, parameters, self._over)
        self._overflowed[id(optimizer)] = overflow
        return not overflow

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step` and return its result.

        If the gradients overflowed on any rank, return None without calling it.
        """
        if self.enabled and id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        if self._overflowed.get(id(optimizer), False):
            return None
        return optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Lower the scale after an overflow, or raise it after enough steps without an overflow.

        Raises:
            ValueError: no optimizer's gradients have been unscaled since the last call.
        """
        if not self.enabled:
            return
        if not self._overflowed:
            raise ValueError("call step() or unscale_() before update()")
        if any(self._overflowed.values()):
            self._scale *= self.backoff_factor
            self._num_finite = 0
        else:
            self._num_finite += 1
            if self._num_finite == self.growth_interval:
                self._num_finite = 0
                grown = self._scale * self.growth_factor
                self._scale = grown if grown < torch.finfo(torch.float32).max else self._scale
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, to be saved in a checkpoint.

        The state is the same on all ranks if no step is in progress.
        """
        return {"scale": self._scale, "num_finite": self._num_finite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. The growth and backoff settings are not changed."""
        self._scale, self._num_finite = float(state["scale"]), int(state["num_finite"])
        self._overflowed.clear()


def _unscale(gradients: list[torch.Tensor], factor: float) -> bool:
    """Multiply gradients in place by a factor; return whether any element is not finite."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient)
    flags = []
    for here in by_device.values():
        greatest = torch.stack(torch._foreach_norm(here, math.inf))  # before: a NaN stays one
        torch._foreach_mul_(here, factor)
        flags.append(greatest.isfinite().logical_not().any())
    return any(bool(flag) for flag in flags)


def share_overflow(
    overflow: bool, parameters: Iterable[torch.Tensor], over: ProcessGroup | None = None
) -> bool:
    """Return whether any rank found an overflow. Collective among ranks that hold parameters.

    Args:
        overflow: whether this rank found an overflow.
        parameters: the parameters whose groups combine the overflow flags of their ranks.
        over: a group to use instead of the parameters' groups.
    """
    members = [member for member in map(member_of, parameters) if member is not None]
    groups = [over] if over is not None else _groups(members)
    device = members[0].flat.device if members else None
    for group in groups:
        flag = torch.tensor([float(overflow)], device=device)
        if group.size > 1:
            group.all_reduce(flag, op="max")
        overflow = bool(flag)
    return overflow


def _groups(members: list[Member]) -> list[ProcessGroup]:
    """Return the largest group over which parameters are sharded, and all replica groups."""
    over = largest(groups_of(members))
    replicas = {member.flat.replicas: None for member in members}
    return [group for group in (over, *replicas) if group is not None]
