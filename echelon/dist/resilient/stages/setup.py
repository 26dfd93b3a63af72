"""Define the objects that train a pipeline in one world, as returned by a program's `build`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.slices import slice_of
from echelon.dist.pipeline import Pipeline, Stage
from echelon.dist.resilient.checks import check_kind
from echelon.dist.resilient.copies.parts import Part, sharded_parts
from echelon.dist.resilient.kept import Stateful
from echelon.dist.resilient.stages.layout import CURE

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PipelineSetup(Generic[_T]):
    """The objects needed to train a pipeline in one world; see `run_pipeline`.

    Attributes:
        pipe: the pipeline.
        optimizer: the optimizer of the pipeline's parameters.
        train_step: computes one step, given the step's number. It must change only the pipeline's
            parameters and buffers, the optimizer, `also` and the random number generators.
        also: schedules and other objects whose state the steps change. Their state must be
            identical on all ranks.

    Example:
        >>> stage = Stage(nn.Linear(4, 4), index=0, num_stages=1)
        >>> pipe = Pipeline([stage], num_microbatches=2, loss_fn=nn.MSELoss())
        >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        >>> setup = PipelineSetup(pipe, optimizer, lambda step: None, also=[schedule])
    """

    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    train_step: Callable[[int], _T]
    also: Sequence[Stateful] = ()


def check_setup(setup: Any) -> None:
    """Check that `build` returned a setup whose state can be copied and restored.

    Raises:
        ValueError: `setup` is not a `PipelineSetup`, or a part of its state cannot be restored.
    """
    if not isinstance(setup, PipelineSetup):
        raise ValueError(f"build must return a PipelineSetup, not {type(setup).__name__}")
    if not isinstance(setup.pipe, Pipeline):
        raise ValueError(f"pipe= must be a Pipeline, not {type(setup.pipe).__name__}")
    check_kind(setup.pipe.module)
    known = set(setup.pipe.parameters())
    seen: dict[str, tuple[int, torch.Tensor]] = {}
    for name, tensor, index in named_tensors(setup.pipe.stages):
        first, other = seen.setdefault(name, (index, tensor))
        if other is not tensor:
            raise ValueError(
                f"stages {first} and {index} both have a parameter or buffer named {name!r}: {CURE}"
            )
        if slice_of(tensor) is not None:
            raise ValueError(
                "resilient.run_pipeline does not support parameters that are split by tensor "
                f"parallelism, such as {name!r}"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name!r} is on {tensor.device}, but run_pipeline supports only stages on the CPU"
            )
    for group in setup.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    "resilient.run_pipeline cannot restore a parameter that is in the optimizer, "
                    f"but not in the pipeline: a parameter of shape {list(parameter.shape)}"
                )


def named_tensors(stages: Sequence[Stage]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield the name, the tensor and the stage index of each parameter and buffer of the stages.

    Each name is the tensor's name in the whole model. A tensor with several names is yielded once
    per name.
    """
    for stage in stages:
        module = stage.module
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield stage.prefix + name, parameter, stage.index
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield stage.prefix + name, buffer, stage.index


def named_modules(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of the stages with its name in the whole model."""
    for stage in stages:
        for name, module in stage.module.named_modules(remove_duplicate=False):
            yield (stage.prefix + name).removesuffix("."), module


def parts_of(stages: Sequence[Stage]) -> dict[str, Part]:
    """Return the parts of the whole model that a rank's stages hold, by name.

    A tensor with several names is returned under each of them, because a stage that is built later
    might use only one of these names.
    """
    found: dict[str, Part] = {}
    for stage in stages:
        found |= sharded_parts(stage.module, stage.prefix, stage.index)
    for name, tensor, stage_index in named_tensors(stages):
        if member_of(tensor) is None:
            found[name] = Part.whole(name, tensor, stage_index)
    return found
