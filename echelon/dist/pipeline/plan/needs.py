"""The dependencies between computations, which every valid order respects.

Each computation on the left needs the results on the right:

    forward of stage s            the forward of stage s - 1
    backward of stage s           the forward of stage s; the backward or input gradients of s + 1
    weight gradients of stage s   the input gradients of stage s

All dependencies are within the same micro-batch. Data is passed as a message if the two stages are
on different ranks.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from echelon.dist.pipeline.plan.action import Action, Kind


class Product(str, Enum):
    """The kinds of results that computations produce."""

    OUTPUT = "output"  # of a forward, for the next stage
    INPUT_GRAD = "input gradient"  # of a backward, for the stage before
    WEIGHT_GRAD = "weight gradient"


class Thing(NamedTuple):
    """A result that one computation produces and other computations need."""

    product: Product
    stage: int
    microbatch: int


_MAKES = {
    Kind.FORWARD: (Product.OUTPUT,),
    Kind.BACKWARD: (Product.INPUT_GRAD, Product.WEIGHT_GRAD),
    Kind.INPUT_GRAD: (Product.INPUT_GRAD,),
    Kind.WEIGHT_GRAD: (Product.WEIGHT_GRAD,),
}


def makes(action: Action) -> list[Thing]:
    """Return the results that a computation produces."""
    return [
        Thing(product, part.stage, part.microbatch)
        for part in action.computations
        for product in _MAKES[part.kind]
    ]


def needs(action: Action, num_stages: int) -> list[Thing]:
    """Return the results that a computation needs before it can begin.

    An overlap can begin only once the results that all its parts need are available.
    """
    return [thing for part in action.computations for thing in _needs(part, num_stages)]


def _needs(part: Action, num_stages: int) -> list[Thing]:
    stage, microbatch = part.stage, part.microbatch
    if part.kind is Kind.FORWARD:
        return [] if stage == 0 else [Thing(Product.OUTPUT, stage - 1, microbatch)]
    if part.kind is Kind.WEIGHT_GRAD:
        return [Thing(Product.INPUT_GRAD, stage, microbatch)]
    own = Thing(Product.OUTPUT, stage, microbatch)
    if stage == num_stages - 1:
        return [own]
    return [own, Thing(Product.INPUT_GRAD, stage + 1, microbatch)]
