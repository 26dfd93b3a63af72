"""The actions of a schedule and their text form, such as `2F0`.

`2F0` is the forward pass of micro-batch 0 in stage 2. The text format is the same as in PyTorch's
pipelining, so that schedules can be exchanged with PyTorch:

    2F0  2B0             forward and full backward of micro-batch 0 in stage 2
    2I0  2W0             the backward in two halves: input gradients, weight gradients
    (0F4;3B1)OVERLAP_F_B several computations whose communication can overlap
    1SEND_F3  2RECV_F3   stage 1's output for micro-batch 3 is sent to stage 2
    2SEND_B3  1RECV_B3   its gradient is returned to stage 1
    1UNSHARD  1RESHARD  1REDUCE_GRAD   actions of a sharded stage around its computations

An action defines what is done, and for which micro-batch. A rank
executes the actions of its row of the plan in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """The kinds of actions; each value is the kind's name in the text format of plans."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    OVERLAP = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.OVERLAP})
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_TEXT = re.compile(
    r"(\d{1,6})(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d{0,6})"
)


@dataclass(frozen=True, slots=True)
class Action:
    """An action of one rank.

    For sharding actions, which do not belong to a micro-batch, `microbatch` is -1. For an overlap,
    `parts` contains the computations, and `stage` and `microbatch` are -1.

    Example:
        >>> Action.parse("1F0")
        Action(stage=1, kind=...)
        >>> str(Action.parse("1F0"))
        '1F0'
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    @property
    def is_compute(self) -> bool:
        """True if the action computes something, rather than moving data or parameters."""
        return self.kind in COMPUTE

    @property
    def computations(self) -> tuple[Action, ...]:
        """The computations of the action, in order; () if the action does not compute anything."""
        if self.kind is Kind.OVERLAP:
            return self.parts
        return (self,) if self.is_compute else ()

    def __str__(self) -> str:
        """Return the text of the action in PyTorch's format."""
        if self.kind is Kind.OVERLAP:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        number = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{number}"

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the text of an action.

        Raises:
            ValueError: the text does not describe an action.
        """
        text = text.strip()
        if text.startswith("("):
            return _parse_overlap(text)
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not an action; examples of actions are '2F0', '1SEND_B3' and "
                "'0UNSHARD'"
            )
        stage, kind, microbatch = found.groups()
        needs_number = Kind(kind) not in SHARDING
        if needs_number and not microbatch:
            raise ValueError(
                f"{text!r} lacks a micro-batch number: use '{text}0' for the first micro-batch"
            )
        if not needs_number and microbatch:
            raise ValueError(
                f"{text!r}: {kind} applies to a whole stage, so it takes no micro-batch number"
            )
        return Action(int(stage), Kind(kind), int(microbatch) if microbatch else -1)


def _parse_overlap(text: str) -> Action:
    inside, closing, kind = text[1:].partition(")")
    if not closing or kind.strip() != Kind.OVERLAP.value:
        raise ValueError(f"{text!r} is not an action; an overlap looks like '(0F4;3B1)OVERLAP_F_B'")
    parts = tuple(Action.parse(part) for part in inside.split(";"))
    for part in parts:
        if part.kind is Kind.OVERLAP or not part.is_compute:
            raise ValueError(
                f"{text!r}: {part} is not a computation; only computations can overlap"
            )
    return Action(-1, Kind.OVERLAP, parts=parts)


def forward(stage: int, microbatch: int) -> Action:
    """Return the forward action of a micro-batch in a stage."""
    return Action(stage, Kind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Return the full backward action of a micro-batch in a stage."""
    return Action(stage, Kind.BACKWARD, microbatch)


def input_grad(stage: int, microbatch: int) -> Action:
    """Return the action that computes input gradients, which the previous stage needs."""
    return Action(stage, Kind.INPUT_GRAD, microbatch)


def weight_grad(stage: int, microbatch: int) -> Action:
    """Return the action that computes weight gradients, which no other rank needs."""
    return Action(stage, Kind.WEIGHT_GRAD, microbatch)


def overlap(*parts: Action) -> Action:
    """Combine several computations into one action; a single computation is returned unchanged."""
    return parts[0] if len(parts) == 1 else Action(-1, Kind.OVERLAP, parts=parts)


def computations(row: list[Action]) -> Iterator[Action]:
    """Yield a row's computations in order, with overlaps split into their parts."""
    for action in row:
        yield from action.computations
