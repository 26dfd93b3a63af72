"""Create a fitted schedule, in which an idle rank always runs the most urgent action that is ready.

Input gradients are the most urgent, because earlier stages wait for them, and because weight
gradients, which free memory, depend on them. Forward passes follow, as far as memory allows. Weight
gradients fill idle time, and run before forward passes if memory is short. The schedule is the
order of a simulated execution, so it cannot deadlock. It can be faster than the named schedules if
the stages differ in cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.dist.pipeline.plan.action import Action, Kind, forward, input_grad, weight_grad
from echelon.dist.pipeline.plan.needs import Thing, makes, needs
from echelon.dist.pipeline.simulation.costs import Costs, of_stage


def fitted(
    rank_of_stage: Sequence[int], num_microbatches: int, costs: Costs, memory_bytes: float
) -> list[list[Action]] | None:
    """Return one row of actions per rank, or None if the memory limit makes progress impossible.

    Args:
        rank_of_stage: the rank that holds each stage.
        num_microbatches: the number of micro-batches, 1 or more.
        costs: the costs of each stage.
        memory_bytes: the limit on each rank's activations, in bytes.
    """
    ranks = [_Rank(rank, rank_of_stage, num_microbatches, costs, memory_bytes)
             for rank in range(max(rank_of_stage) + 1)]  # fmt: skip
    there: dict[Thing, tuple[float, int]] = {}  # when it was made, and on which rank
    now = 0.0
    while any(rank.is_busy for rank in ranks):
        for rank in ranks:
            if rank.free_at <= now and rank.is_busy:
                action = rank.choose(there, now)
                if action is not None:
                    rank.take(action, now)
                    for thing in makes(action):
                        there[thing] = (rank.free_at, rank.rank)
        later = [t for t, _ in there.values()] + [t + costs.latency for t, _ in there.values()]
        coming = [moment for moment in later if moment > now]
        if not coming:
            return None
        now = min(coming)
    return [rank.row for rank in ranks]


class _Rank:
    """The state of one rank in the simulated execution."""

    def __init__(
        self,
        rank: int,
        rank_of_stage: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        memory_bytes: float,
    ) -> None:
        self.rank = rank
        self.row: list[Action] = []
        self.free_at = 0.0
        self._costs = costs
        self._num_stages = len(rank_of_stage)
        self._room = memory_bytes
        stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
        numbers = range(num_microbatches)
        self._left: dict[Kind, list[Action]] = {
            # Late stages first: what they free is freed soonest.
            Kind.INPUT_GRAD: [input_grad(s, m) for m in numbers for s in reversed(stages)],
            Kind.FORWARD: [forward(s, m) for m in numbers for s in reversed(stages)],
            Kind.WEIGHT_GRAD: [weight_grad(s, m) for m in numbers for s in reversed(stages)],
        }
        # A first stage that took all the memory would leave none for the stages after it.
        self._reserve = {
            stage: sum(of_stage(costs.activation_bytes, s) for s in stages if s > stage)
            for stage in stages
        }

    @property
    def is_busy(self) -> bool:
        """True if the rank has computations left."""
        return any(self._left.values())

    def choose(self, there: dict[Thing, tuple[float, int]], now: float) -> Action | None:
        """Return the next action to run, or None if no action can run at time `now`."""
        for kind in (Kind.INPUT_GRAD, Kind.FORWARD, Kind.WEIGHT_GRAD):
            for action in self._left[kind]:
                if self._is_ready(action, there, now) and self._fits(action):
                    return action
        return None

    def take(self, action: Action, now: float) -> None:
        """Append an action to the row, and account for its duration and memory."""
        self.row.append(action)
        self._left[action.kind].remove(action)
        self.free_at = now + self._costs.duration(action)
        held = of_stage(self._costs.activation_bytes, action.stage)
        if action.kind is Kind.FORWARD:
            self._room -= held
        elif action.kind is Kind.WEIGHT_GRAD:
            self._room += held

    def _fits(self, action: Action) -> bool:
        if action.kind is not Kind.FORWARD:
            return True
        needed = of_stage(self._costs.activation_bytes, action.stage)
        return needed + self._reserve[action.stage] <= self._room

    def _is_ready(self, action: Action, there: dict[Thing, tuple[float, int]], now: float) -> bool:
        for thing in needs(action, self._num_stages):
            made = there.get(thing)
            if made is None:
                return False
            when, maker = made
            if when + (self._costs.latency if maker != self.rank else 0.0) > now:
                return False
        return True
