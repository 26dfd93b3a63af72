"""Reject models and optimizers whose state cannot be restored after a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.dist.dtensor import is_dtensor
from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.unit import Unit, units_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.names import StageModules


def check_model(model: nn.Module, world: ProcessGroup) -> None:
    """Check that a model can be copied, or can be sharded again across other ranks.

    Raises:
        ValueError: the model can be neither copied nor sharded again.
    """
    if isinstance(model, StageModules):
        raise ValueError("resilient.run cannot train a pipeline's stages: use run_pipeline")
    check_kind(model)
    units = units_of(model)
    for unit in units:
        _check_unit(unit, world)
        if driver_of(unit) is not driver_of(units[0]):
            raise _cannot_continue(unit, f"is not sharded over the same mesh as {units[0]}")


def check_kind(model: nn.Module) -> None:
    """Check that a model consists of tensors that can be copied and restored.

    Raises:
        ValueError: the model is a DistributedDataParallel module, or has DTensors or expanded
            buffers.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "echelon.dist.resilient does not support DistributedDataParallel, whose groups it "
            "cannot recreate: pass the module inside it (ddp.module), and average gradients with "
            "SameBits"
        )
    if any(is_dtensor(one) for one in model.parameters()):
        raise ValueError(
            "echelon.dist.resilient does not support DTensors: it cannot recover the parts of a "
            "lost rank. Use fully_shard, or restart from a checkpoint"
        )
    for name, buffer in model.named_buffers():
        places = zip(buffer.stride(), buffer.shape, strict=True)
        if any(stride == 0 and length > 1 for stride, length in places):
            raise ValueError(
                f"buffer {name!r} is expanded and cannot be restored: clone the buffer first"
            )


def check_units(model: nn.Module, before: Sequence[Unit]) -> None:
    """Check that `prepare` has not sharded any part of the model since `run` began.

    Raises:
        ValueError: `prepare` sharded a part of the model.
    """
    if units_of(model) != list(before):
        raise ValueError(
            "prepare called fully_shard on a part of the model, but shards created in prepare "
            "cannot be restored if a rank is lost: call fully_shard before resilient.run"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer does not contain sharded parameters of other models.

    Raises:
        ValueError: the optimizer contains such a parameter.
    """
    own = {member for unit in units_of(model) for member in unit.members}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = member_of(parameter)
            if member is not None and member not in own:
                raise ValueError(
                    "resilient.run cannot restore a sharded parameter that is in the optimizer, "
                    f"but not in the model: {member}"
                )


def _check_unit(unit: Unit, world: ProcessGroup) -> None:
    driver = driver_of(unit)
    if not _covers(driver.group, driver.replicas, world):
        raise _cannot_continue(unit, "is not sharded over all ranks of the world, in their order")
    if unit.device.type != "cpu":
        where = f"is on {unit.device}, where copies of shards have not been tried"
        raise _cannot_continue(unit, where)


def _covers(among: ProcessGroup, replicas: ProcessGroup | None, world: ProcessGroup) -> bool:
    """Return whether two groups are this rank's row and column in a row-major grid of all ranks."""
    num_replicas = 1 if replicas is None else replicas.size
    row, column = divmod(world.rank, among.size)
    ranks = list(world.ranks)
    columns = ranks[column :: among.size] if replicas is None else list(replicas.ranks)
    return (
        among.size * num_replicas == world.size
        and list(among.ranks) == ranks[row * among.size : (row + 1) * among.size]
        and columns == ranks[column :: among.size]
    )


def _cannot_continue(unit: Unit, reason: str) -> ValueError:
    return ValueError(
        f"resilient.run cannot continue with this sharded model after a loss: {unit} {reason}"
    )
