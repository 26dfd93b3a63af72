"""Maintain an exponential moving average of a model's parameters.

    average  <-  decay * average + (1 - decay) * parameter        after each step of the optimizer

The average is built like an optimizer: it stores one tensor of the same shape for each parameter.
Under `fully_shard`, each rank therefore stores only the average of its own shards and does not
communicate. A checkpoint saves the average under the parameter's name, like an optimizer's state,
and can be loaded on any number of ranks. The class has no `step`, because torch and the recorder
count calls of `step` as training steps.

Buffers are not averaged, and neither are parameters that do not require gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import member_of

_STATE = "average"


class ExponentialMovingAverage(torch.optim.Optimizer):
    """The moving averages of a model's parameters, which are initialized to the parameters.

    Create the averages after `fully_shard`. They take as much memory as another copy of this rank's
    shards (in float32 for lower-precision parameters). Inside `applied()`, they hold another
    copy of the shards.

    Args:
        parameters: a model, a pipeline stage, a pipeline, or an iterable of parameters.
        decay: the decay per update, at least 0 and below 1.
        warmup: whether to use the smaller of `decay` and (1 + n) / (10 + n) in update n, counted
            from 0. Without a warm-up, early averages consist mostly of the values before training.

    Raises:
        ValueError: an argument is invalid, or no parameter requires gradients.

    Example:
        >>> average = ExponentialMovingAverage(model, decay=0.999)
        >>> optimizer.step()
        >>> average.update()
        >>> with average.applied():
        ...     loss = loss_fn(model(tokens), targets)
        >>> save("runs/gpt", {"model": model, "optimizer": optimizer, "average": average})
    """

    def __init__(
        self,
        parameters: nn.Module | Any | Iterable[nn.Parameter],
        decay: float = 0.999,
        *,
        warmup: bool = True,
    ) -> None:
        if not isinstance(decay, (int, float)) or not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}")
        given = parameters.parameters() if hasattr(parameters, "parameters") else parameters
        trained = {id(one): one for one in map(_owner, given) if one.requires_grad}
        if not trained:
            raise ValueError("no parameter requires gradients, so there is nothing to average")
        self._backup: list[tuple[nn.Parameter, torch.Tensor]] | None = None
        defaults = {"decay": decay, "warmup": warmup, "num_updates": 0}
        super().__init__(list(trained.values()), defaults)
        for parameter in self._parameters():
            self.state[parameter][_STATE] = _copy(parameter)

    @property
    def num_updates(self) -> int:
        """The number of updates so far."""
        count: int = self.param_groups[0]["num_updates"]
        return count

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages from the parameters, after an optimizer step. Not collective.

        Raises:
            ValueError: the method was called inside `applied()`.
        """
        self._check_not_applied("update()")
        for group in self.param_groups:
            decay = _decay_at(group["num_updates"], group["decay"], warmup=group["warmup"])
            group["num_updates"] += 1
            values = [one.detach() for one in group["params"]]
            averages = [self.state[one][_STATE] for one in group["params"]]
            values = [v.to(a.dtype) for v, a in zip(values, averages, strict=True)]
            torch._foreach_lerp_(averages, values, 1.0 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters with their averages inside the context.

        Use the context for evaluation, or to save only the averaged weights. Save a training run's
        checkpoint outside the context. When the context ends, even because of an exception, the
        parameters' values are restored exactly. All ranks must enter and leave the context between
        steps.

        Raises:
            ValueError: the method was called inside another `applied()` context.
        """
        self._check_not_applied("applied()")
        backup = [(one, one.detach().clone()) for one in self._parameters()]
        self._backup = backup
        try:
            self._put([(one, self.state[one][_STATE]) for one, _ in backup])
            yield
        finally:
            self._put(backup)
            self._backup = None

    @torch.no_grad()
    def _put(self, values: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        for parameter, value in values:
            parameter.copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load averages from a saved state, converting them to this object's dtypes.

        Raises:
            ValueError: the method was called inside `applied()`, or the state does not match the
                parameters.
        """
        self._check_not_applied("load_state_dict()")
        super().load_state_dict(state_dict)
        loaded = state_dict["state"]  # torch's own method casts them to the parameters' dtype
        for number, parameter in enumerate(self._parameters()):
            average = loaded.get(number, {}).get(_STATE)
            if average is None:
                raise ValueError(f"the state does not contain an average of parameter {number}")
            self.state[parameter][_STATE] = _copy(average.to(parameter.device), parameter.dtype)

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 -- as the base class has it
        """Raise an error, because averages are updated with `update()`, not with `step()`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a moving average has no step() of its own: call update() after the optimizer's step()"
        )

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (one for group in self.param_groups for one in group["params"])

    def _check_not_applied(self, call: str) -> None:
        if self._backup is not None:
            raise ValueError(
                f"{call} is not allowed inside applied(), where the parameters hold the averages"
            )


def _owner(parameter: nn.Parameter) -> nn.Parameter:
    member = member_of(parameter)
    return parameter if member is None else member.shard


def _copy(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor with at least float32 precision, so that small updates are not rounded away."""
    kept = torch.promote_types(dtype or values.dtype, torch.float32)
    return values.detach().to(kept, copy=True)


def _decay_at(num_updates: int, decay: float, *, warmup: bool) -> float:
    if not warmup:
        return decay
    return min(decay, (1 + num_updates) / (10 + num_updates))


def half_life(num_steps: float) -> float:
    """Return the decay at which a value's weight in the average halves after `num_steps` updates.

    Raises:
        ValueError: `num_steps` is not positive and finite.

    Example:
        >>> round(half_life(1000) ** 1000, 6)
        0.5
    """
    if not (num_steps > 0 and math.isfinite(num_steps)):
        raise ValueError(f"num_steps must be positive and finite, got {num_steps!r}")
    return math.exp(-math.log(2.0) / num_steps)
