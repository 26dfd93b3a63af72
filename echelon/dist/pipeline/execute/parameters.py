"""Access the values and gradients of a stage's parameters, whether sharded or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from echelon.dist.fsdp import gradient_sync, reduce_gradients, reshard, shards, unshard
from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.stage import Stage

__all__ = ["Tied", "gradient_sync", "groups_of", "is_sharded", "reduce_gradients", "reshard",
           "unshard", "whole_parameters"]  # fmt: skip


def is_sharded(stage: Stage) -> bool:
    """Return whether any of a stage's parameters are sharded across ranks by `fully_shard`."""
    return bool(units_of(stage.module))


def groups_of(stage: Stage) -> Iterator[ProcessGroup]:
    """Yield the process groups across which a stage's parameters are sharded.

    A group can be yielded more than once.
    """
    for unit in units_of(stage.module):
        yield from driver_of(unit).groups()


def whole_parameters(stage: Stage) -> list[nn.Parameter]:
    """Return the parameters that require gradients and are not sharded."""
    return [
        parameter
        for parameter in stage.module.parameters()
        if parameter.requires_grad and member_of(parameter) is None
    ]


class Tied:
    """A parameter that is tied to parameters of other stages.

    If the parameter is sharded, its full value and gradient are assembled from all shards by
    summing tensors that are zero outside each rank's own shard. The sum is bit-exact.
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage = stage
        self.name = name
        self._kept: torch.Tensor | None = None
        parameter = self._parameter()
        if not parameter.is_floating_point():
            raise ValueError(
                f"ties: '{stage.index}:{name}' has dtype {parameter.dtype}, but only "
                "floating-point parameters can be tied"
            )

    @property
    def is_trained(self) -> bool:
        """True if the parameter requires gradients."""
        return self.holder().requires_grad

    def room(self) -> torch.Tensor:
        """Allocate a tensor for the value or gradient of another stage's copy of the parameter."""
        shard = shards(self._stage.module).get(self.name)
        if shard is None:
            return torch.empty_like(self._parameter(), requires_grad=False)
        return shard.data.new_empty(shard.shape)

    def value(self) -> torch.Tensor:
        """Return the full value of the parameter. Collective among the ranks that hold shards."""
        shard = shards(self._stage.module).get(self.name)
        if shard is None:
            return self._parameter().detach()
        return self._gathered(shard.data)

    def set_value(self, value: torch.Tensor) -> None:
        """Set the parameter to a full value; if it is sharded, store only this rank's shard."""
        shard = shards(self._stage.module).get(self.name)
        with torch.no_grad():
            if shard is None:
                self._parameter().copy_(value)
            else:
                part = value.reshape(-1)[shard.start : shard.start + shard.length]
                shard.data.copy_(part)

    def set_aside(self) -> None:
        """Set aside the gradient from earlier steps, to exclude it from this step's sum."""
        holder = self.holder()
        self._kept, holder.grad = holder.grad, None

    def gradient(self) -> torch.Tensor:
        """Return the parameter's full gradient in this step.

        Collective among the ranks that hold a shard of the parameter.
        """
        holder = self.holder()
        shard = shards(self._stage.module).get(self.name)
        if shard is None:
            return torch.zeros_like(holder) if holder.grad is None else holder.grad
        own = torch.zeros_like(shard.data) if holder.grad is None else holder.grad.reshape(-1)
        return self._gathered(own)

    def set_gradient(self, total: torch.Tensor) -> None:
        """Set the gradient to the sum over all stages, plus the gradient that was set aside."""
        holder = self.holder()
        shard = shards(self._stage.module).get(self.name)
        if shard is not None:
            total = total.reshape(-1)[shard.start : shard.start + shard.length]
        gradient = total.reshape(holder.shape).clone()
        holder.grad = gradient if self._kept is None else self._kept.add_(gradient)
        self._kept = None

    def holder(self) -> nn.Parameter:
        """Return the tensor that the optimizer updates: the parameter or this rank's shard."""
        shard = shards(self._stage.module).get(self.name)
        return self._parameter() if shard is None else shard.parameter

    def _parameter(self) -> nn.Parameter:
        found = dict(self._stage.module.named_parameters(remove_duplicate=False)).get(self.name)
        if found is None:
            raise ValueError(f"stage {self._stage.index} has no parameter {self.name!r}")
        return found

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        shard = shards(self._stage.module)[self.name]
        member = member_of(shard.parameter)
        assert member is not None, self.name
        whole = own.new_zeros(shard.shape).reshape(-1)
        whole[shard.start : shard.start + shard.length] = own
        member.flat.group.all_reduce(whole)
        return whole.reshape(shard.shape)
