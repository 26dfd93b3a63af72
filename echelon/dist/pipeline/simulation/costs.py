"""The costs in a simulation: durations, link speeds and activation sizes.

Any unit of time can be used, but all costs must use the same unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.dist.pipeline.plan.action import Action, Kind

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations and sizes, each given as one number for all stages or as one number per stage.

    Attributes:
        forward, input_grad, weight_grad: the durations for one micro-batch in one stage.
        backward: the duration of a full backward pass; None means input_grad + weight_grad.
        overlap: the duration of a forward and a backward pass that overlap, as a fraction of the
            sum of their durations when run one after the other.
        latency: the latency of a message between two ranks.
        bandwidth: the number of bytes that a link transfers per unit of time; each link sends one
            message at a time.
        message_bytes: the size of a stage's output for one micro-batch, which is also the size of
            the output's gradient.
        activation_bytes: the size of the activations that a stage stores for one micro-batch until
            the micro-batch's weight gradients are computed.

    Example:
        >>> costs = Costs(forward=1.0, input_grad=1.0, weight_grad=[1.0, 2.0], latency=0.5)
        >>> simulate(schedule("1f1b", num_ranks=2, num_microbatches=4), costs=costs).makespan
        20.0
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    backward: PerStage | None = None
    overlap: float = 1.0
    latency: float = 0.0
    bandwidth: float = float("inf")
    message_bytes: PerStage = 0.0
    activation_bytes: PerStage = 0.0

    def check(self, num_stages: int) -> None:
        """Check that the number of values is correct and that no value is negative.

        Raises:
            ValueError: the number of values is not `num_stages`, a value is negative, or the
                bandwidth is 0.
        """
        for name, value in vars(self).items():
            if value is None:
                continue
            numbers = [value] if isinstance(value, int | float) else list(value)
            if len(numbers) != num_stages and not isinstance(value, int | float):
                raise ValueError(
                    f"{name} has {len(numbers)} numbers, but there are {num_stages} stages"
                )
            if not all(number >= 0 for number in numbers):
                raise ValueError(f"{name} must not be negative: {value!r}")
        if self.bandwidth == 0:
            raise ValueError("bandwidth must be above 0, got 0")

    def duration(self, action: Action) -> float:
        """Return the duration of an action, or 0 if the action is not a computation."""
        if action.kind is Kind.OVERLAP:
            return self.overlap * sum(self.duration(part) for part in action.parts)
        if not action.is_compute:
            return 0.0
        if action.kind is Kind.BACKWARD:
            if self.backward is not None:
                return of_stage(self.backward, action.stage)
            split = (self.input_grad, self.weight_grad)
            return sum(of_stage(cost, action.stage) for cost in split)
        cost = {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
        }[action.kind]
        return of_stage(cost, action.stage)


def of_stage(value: PerStage, stage: int) -> float:
    """Return a stage's value, given one value for all stages or one value per stage."""
    return float(value) if isinstance(value, int | float) else float(value[stage])
