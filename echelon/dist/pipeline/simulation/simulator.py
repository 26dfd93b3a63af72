"""Simulate a plan's execution: start and end times, idle time, memory, and the critical path.

Every rank executes its row in order. An action begins when its rank is free and all results that
it needs have arrived. Messages are asynchronous and overlap with computations, as in `run.py`. The
rows and the costs determine all times, so the simulation is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.deadlock import blocked
from echelon.dist.pipeline.plan.needs import Product, Thing, makes, needs
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.pipeline.simulation.costs import Costs, PerStage, of_stage


@dataclass(frozen=True, slots=True)
class Slot:
    """An action with its start and end times.

    `cause` is the slot that the action waited for last, as (rank, position in the rank's slots),
    or None if it waited for no slot. `idle` is how long the rank was idle before the action.
    """

    rank: int
    action: Action
    start: float
    end: float
    idle: float
    cause: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        makespan: the time from the first action's start to the last action's end, in the costs'
            unit.
        bubble: the fraction of time that a rank is idle, averaged over all ranks, from 0 to 1.
        peak_activations: for each rank, the maximum number of (stage, micro-batch) pairs whose
            activations the rank holds at once.
        peak_bytes: for each rank, the maximum size of the activations that the rank holds at once,
            according to `Costs.activation_bytes`.
        slots: for each rank, its computations with their times.
        critical_path: the chain of slots that determines the makespan, from first to last.
    """

    plan: Plan
    makespan: float
    bubble: float
    peak_activations: list[int]
    peak_bytes: list[float]
    slots: tuple[tuple[Slot, ...], ...]
    critical_path: tuple[Slot, ...]


def simulate(
    plan: Plan,
    forward: PerStage = 1.0,
    input_grad: PerStage = 1.0,
    weight_grad: PerStage = 1.0,
    *,
    costs: Costs | None = None,
) -> Simulation:
    """Simulate a plan's execution.

    Args:
        plan: any plan. Its message and sharding actions are ignored; the times of messages follow
            from `costs`.
        forward: the cost of one chunk's forward pass, as one number for all stages or one per
            stage.
        input_grad: the cost of computing one chunk's input gradients.
        weight_grad: the cost of computing one chunk's weight gradients; a full backward pass takes
            input_grad + weight_grad.
        costs: all costs; replaces the three arguments above.

    Raises:
        PlanError: an action can never run.
        ValueError: the costs do not match the plan.

    Example:
        >>> for name in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble"):
        ...     simulation = simulate(schedule(name, num_ranks=4, num_microbatches=8))
        ...     print(name, round(simulation.bubble, 2))
        1f1b 0.27
        interleaved_1f1b 0.16
        interleaved_zero_bubble 0.06
    """
    costs = costs or Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
    costs.check(plan.num_stages)
    slots = _Clock(plan, costs).run()
    every = [slot for row in slots for slot in row]
    makespan = max(slot.end for slot in every) - min(slot.start for slot in every)
    busy = sum(slot.end - slot.start for slot in every)
    peaks = [_peaks(row, costs) for row in slots]
    return Simulation(
        plan=plan,
        makespan=makespan,
        bubble=1 - busy / (makespan * plan.num_ranks) if makespan else 0.0,
        peak_activations=[count for count, _ in peaks],
        peak_bytes=[held for _, held in peaks],
        slots=tuple(tuple(row) for row in slots),
        critical_path=tuple(_critical_path(slots)),
    )


class _Clock:
    """A simulated clock that advances all ranks in turn, as far as possible, until they finish."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan = plan
        self._costs = costs
        self._owner = plan.rank_of_stage
        self._slots: list[list[Slot]] = [[] for _ in plan.rows]
        self._made: dict[Thing, tuple[int, int]] = {}  # by which slot
        self._arrival: dict[Thing, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}

    def run(self) -> list[list[Slot]]:
        """Run the simulation; return each rank's actions with their start and end times."""
        rows = [[action for action in row if action.is_compute] for row in self._plan.rows]
        going = True
        while going:
            going = False
            for rank, row in enumerate(rows):
                while len(self._slots[rank]) < len(row) and self._step(
                    rank, row[len(self._slots[rank])]
                ):
                    going = True
        at = [len(slots) for slots in self._slots]
        if any(position < len(row) for position, row in zip(at, rows, strict=True)):
            raise blocked(self._plan)
        return self._slots

    def _step(self, rank: int, action: Action) -> bool:
        wanted = needs(action, len(self._owner))
        if any(thing not in self._made for thing in wanted):
            return False
        mine = self._slots[rank]
        free = mine[-1].end if mine else 0.0
        start, cause = free, (rank, len(mine) - 1) if mine else None
        for thing in wanted:
            there = self._there(thing, rank)
            if there > start:
                start, cause = there, self._made[thing]
        slot = Slot(rank, action, start, start + self._costs.duration(action), start - free, cause)
        for thing in makes(action):
            self._made[thing] = (rank, len(mine))
            self._send(thing, rank, slot.end)
        mine.append(slot)
        return True

    def _there(self, thing: Thing, rank: int) -> float:
        """Return the time at which a result is available on a rank."""
        maker, position = self._made[thing]
        return self._slots[rank][position].end if maker == rank else self._arrival[thing]

    def _send(self, thing: Thing, rank: int, ready: float) -> None:
        step = {Product.OUTPUT: 1, Product.INPUT_GRAD: -1}.get(thing.product, 0)
        to = thing.stage + step
        if not step or not 0 <= to < len(self._owner) or self._owner[to] == rank:
            return
        # A gradient has the size of the output that it belongs to: the stage before's.
        sized = thing.stage if step == 1 else to
        link = (rank, self._owner[to])
        begins = max(ready, self._link_free.get(link, 0.0))
        gone = begins + of_stage(self._costs.message_bytes, sized) / self._costs.bandwidth
        self._link_free[link] = gone
        self._arrival[thing] = gone + self._costs.latency


def _peaks(slots: list[Slot], costs: Costs) -> tuple[int, float]:
    """Return the peak number of activations that a rank holds, and their peak size in bytes."""
    count = most = 0
    held = most_held = 0.0
    for slot in slots:
        freed: list[Action] = []
        for part in slot.action.computations:
            if part.kind is Kind.FORWARD:
                count += 1
                held += of_stage(costs.activation_bytes, part.stage)
            elif part.kind is not Kind.INPUT_GRAD:
                freed.append(part)
        most, most_held = max(most, count), max(most_held, held)
        count -= len(freed)
        held -= sum(of_stage(costs.activation_bytes, part.stage) for part in freed)
    return most, most_held


def _critical_path(slots: list[list[Slot]]) -> list[Slot]:
    def before(slot: Slot) -> Iterator[Slot]:
        cause = slot.cause
        while cause is not None:
            slot = slots[cause[0]][cause[1]]
            yield slot
            cause = slot.cause

    last = max((row[-1] for row in slots if row), key=lambda slot: slot.end)
    return [last, *before(last)][::-1]
