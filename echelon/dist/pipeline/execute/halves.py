"""Run a backward pass in two halves: input gradients now, and weight gradients later.

In a stage's autograd graph, nodes compute gradients, and parameters are leaves below the nodes. The
graph of a typical linear layer is:

    ... <- output -- AddmmBackward -- input <- ...
                         |-- TBackward -- weight
                         `-- bias

The first half runs the autograd engine only for the inputs, and records the gradients that reach
each node with parameters. These nodes skip any product that only a weight needs. The second half
runs each recorded node again, only for its parameters. Each product is therefore computed once, by
the same kernels as in a full backward pass, and the gradients are bitwise identical.

Not everything is deferred. The gradients of the following parameters are computed immediately,
together with the gradients of the inputs:

* parameters of nodes that lead only to parameters;
* parameters attached to several nodes, because the engine adds their contributions in its own
  order, which must be preserved;
* parameters of a Python `autograd.Function`, because the function would compute all its gradients
  twice.

A hook that changes a gradient runs twice, once in each half. If you use such hooks, choose a
schedule with full backward passes (gpipe, 1f1b, ...). With activation checkpointing, each half
recomputes the activations once (see `recomputation.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from echelon.dist.pipeline.execute.recomputation import recomputed_once

Node = Any  # torch.autograd.graph.Node; its attributes depend on the function


@dataclass
class _Deferred:
    """An autograd node whose parameter gradients are deferred, with its incoming gradients."""

    node: Node
    parameters: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...] = ()

    def note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.gradients = gradients

    def run(self) -> None:
        some = [(nr, one) for nr, one in enumerate(self.gradients) if one is not None]
        if some:
            edges = [GradientEdge(self.node, nr) for nr, _ in some]
            _run(edges, [one for _, one in some], self.parameters)


@dataclass
class WeightHalf:
    """The second half of a backward pass, which can be run only once."""

    _deferred: list[_Deferred] = field(default_factory=list)

    def run(self) -> None:
        """Compute the deferred gradients, add them to each `.grad`, and free the graph."""
        with recomputed_once():
            for one in self._deferred:
                one.run()
        self._deferred.clear()


def run_input_half(
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> WeightHalf:
    """Add each input's gradient to its `.grad`, and return the second half of the backward pass.

    Args:
        roots: the roots of the graph, which are the stage's outputs.
        gradients: the gradient of each root.
        inputs: leaves that are not parameters.
    """
    at_once, deferred = _divide(roots, inputs)
    handles = [one.node.register_prehook(one.note) for one in deferred]
    try:
        targets = [*inputs, *at_once]
        if targets:
            _run(roots, gradients, targets, keep=bool(deferred))
    finally:
        for handle in handles:
            handle.remove()
    return WeightHalf(deferred)


def _run(
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    keep: bool = False,
) -> None:
    torch.autograd.backward(roots, list(gradients), retain_graph=keep, inputs=list(inputs))


def _divide(
    roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[_Deferred]]:
    """Divide a backward pass into two halves.

    Returns:
        The parameters whose gradients the first half computes, and the nodes that it leaves to the
        second half.
    """
    own = {id(leaf) for leaf in inputs}
    top = {edge.node for edge in roots}
    hanging: dict[Node, torch.Tensor] = {}  # parameters, and the unary chains above them
    uses: Counter[int] = Counter()
    final: list[torch.Tensor] = []  # at the graph's end
    waiting: list[_Deferred] = []
    for node in _children_first(roots):
        below = [child for child, _ in node.next_functions if child is not None]
        if not below:
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in own:
                hanging[node] = variable
            continue
        if len(below) == 1 and below[0] in hanging and node not in top:
            hanging[node] = hanging[below[0]]
            continue
        parameters = [hanging[child] for child in below if child in hanging]
        uses.update(id(parameter) for parameter in parameters)
        goes_on = len(parameters) < len(below)
        if not goes_on or isinstance(node, BackwardCFunction):
            final += parameters
        elif parameters:
            waiting.append(_Deferred(node, parameters))
    at_once = {id(parameter): parameter for parameter in final}
    for one in waiting:
        at_once.update({id(p): p for p in one.parameters if uses[id(p)] > 1})
    for one in waiting:
        one.parameters = [p for p in one.parameters if id(p) not in at_once]
    return list(at_once.values()), [one for one in waiting if one.parameters]


def _children_first(roots: Sequence[GradientEdge]) -> list[Node]:
    """Return all nodes of a graph, each listed after the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(edge.node, False) for edge in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
