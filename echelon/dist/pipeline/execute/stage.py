"""Wrap a torch module as a pipeline stage, and run its computations.

A stage receives each of the previous stage's tensors as a separate argument, and returns one or
more tensors. Each stage has its own autograd graph: its inputs are leaves, and their gradients are
returned to the previous stage.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from echelon.dist.pipeline.execute.halves import WeightHalf, run_input_half
from echelon.dist.pipeline.execute.recomputation import recomputations

LossFn = Callable[[Any, Any], torch.Tensor]
Tensors = list[torch.Tensor]


@dataclass
class _Saved:
    """The data that the backward pass of a micro-batch needs."""

    inputs: Tensors
    roots: list[GradientEdge]  # of the outputs that require gradients; their data may go
    weights: WeightHalf | None = None


class Stage:
    """One stage of a model.

    Args:
        module: called with the previous stage's outputs or, in the first stage, with the
            micro-batch.
        index: the index of this stage, starting at 0.
        num_stages: the number of stages of the whole model.
        prefix: a prefix, such as "decoder.", that is prepended to the names of the module's
            parameters and buffers to form their names in the whole model. Stages from `split` do
            not need a prefix.

    Raises:
        ValueError: the index is out of range.

    Example:
        >>> modules = split([nn.Linear(8, 8) for _ in range(4)], num_stages=2)
        >>> first = Stage(modules[0], index=0, num_stages=2)
        >>> first.is_first, first.is_last
        (True, False)
    """

    def __init__(self, module: nn.Module, *, index: int, num_stages: int, prefix: str = "") -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"a stage's module must be an nn.Module, got {type(module).__name__}")
        if not 0 <= index < num_stages:
            raise ValueError(f"stage {index} is out of range: expected 0 <= index < {num_stages}")
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self.prefix = prefix
        self._saved: dict[int, _Saved] = {}
        self._is_watched = False  # for recomputations in a weight half

    def __repr__(self) -> str:
        return f"Stage({self.index} of {self.num_stages}, {type(self.module).__name__})"

    @property
    def is_first(self) -> bool:
        """True if the stage takes the model's input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage produces the model's output."""
        return self.index == self.num_stages - 1

    @property
    def device(self) -> torch.device | None:
        """The device of the stage's parameters or, if it has none, of its buffers.

        The value is None if the stage has neither parameters nor buffers.
        """
        first = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
        return None if first is None else first.device

    def keep(self, microbatch: int, inputs: Sequence[Any], outputs: Any) -> None:
        """Store the data that the backward pass of a micro-batch needs."""
        if not torch.is_grad_enabled():
            return
        leaves = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        roots = [get_gradient_edge(one) for one in tensors_of(outputs, self) if one.requires_grad]
        self._saved[microbatch] = _Saved(leaves, roots)

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> Tensors:
        """Run the full backward pass of a micro-batch.

        Args:
            microbatch: the micro-batch's number.
            gradients: the gradient of each output that requires gradients.

        Returns:
            The gradients of the inputs that require gradients; zeros for an unused input.
        """
        saved = self._saved.pop(microbatch)
        if saved.roots:
            torch.autograd.backward(saved.roots, list(gradients))
        return _taken(saved.inputs)

    def input_half(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> Tensors:
        """Run the first half of a backward pass, which computes input gradients; see `backward`."""
        saved = self._saved[microbatch]
        if saved.roots:
            saved.weights = run_input_half(saved.roots, gradients, saved.inputs)
        inputs, saved.inputs, saved.roots = saved.inputs, [], []
        return _taken(inputs)

    def weight_half(self, microbatch: int) -> None:
        """Run the second half of a backward pass, which computes weight gradients."""
        saved = self._saved.pop(microbatch)
        if saved.weights is None:
            return
        if self._is_watched:
            saved.weights.run()
            return
        self._is_watched = True
        with recomputations(self.module) as seen:
            saved.weights.run()
        if seen:
            warnings.warn(
                f"{self}: this schedule splits the backward pass, so activation checkpointing "
                f"recomputes {type(seen[0]).__name__} and others twice. The schedules gpipe, 1f1b, "
                "interleaved_1f1b and looped_bfs do not split the backward pass",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget(self) -> None:
        """Discard all stored data after a failure."""
        self._saved.clear()


def _taken(leaves: Tensors) -> Tensors:
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def tensors_of(outputs: Any, stage: Stage) -> Tensors:
    """Return the outputs of a module as a list.

    Raises:
        ValueError: an output is not a tensor.
    """
    listed = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    strange = [one for one in listed if not isinstance(one, torch.Tensor)]
    if strange or not listed:
        found = type(strange[0]).__name__ if strange else "nothing"
        raise ValueError(
            f"stage {stage.index} ({type(stage.module).__name__}) returned {found}: a stage must "
            "return a tensor or a tuple of tensors"
        )
    return listed
