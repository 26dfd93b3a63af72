"""Search for the fastest schedule that fits in memory, by simulating schedules with given costs.

The search tries each named schedule with every number of chunks that the schedule supports, up to a
maximum. It also tries a fitted schedule for each placement of the stages (`simulate/fitted.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.dist.pipeline.plan.catalog import NAMES, schedule
from echelon.dist.pipeline.plan.plan import Plan, plan_of
from echelon.dist.pipeline.simulation.costs import Costs
from echelon.dist.pipeline.simulation.fitted import fitted
from echelon.dist.pipeline.simulation.simulator import Simulation, simulate

_CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")


@dataclass(frozen=True, kw_only=True)
class Load:
    """The cost of one rank's layers for a whole batch, in any unit of time.

    Attributes:
        forward, input_grad, weight_grad: the durations for the rank's layers and the whole batch,
            measured or estimated.
        overhead: the additional cost of each action, independent of its size.
        activation_bytes: the size of the activations that the rank's layers store for the whole
            batch.
        message_bytes: the size of a stage's output for the whole batch, which is also the size of
            the output's gradient.
        latency, bandwidth: the latency and bandwidth of a link between two ranks.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    overhead: float = 0.0
    activation_bytes: float = 0.0
    message_bytes: float = 0.0
    latency: float = 0.0
    bandwidth: float = float("inf")

    def costs(self, num_microbatches: int, num_chunks: int) -> Costs:
        """Return the costs of one micro-batch in one chunk."""
        share = num_microbatches * num_chunks
        forward, inputs, weights = (
            cost / share + self.overhead
            for cost in (self.forward, self.input_grad, self.weight_grad)
        )
        return Costs(
            forward=forward,
            input_grad=inputs,
            weight_grad=weights,
            backward=inputs + weights - self.overhead,
            activation_bytes=self.activation_bytes / share,
            message_bytes=self.message_bytes / num_microbatches,
            latency=self.latency,
            bandwidth=self.bandwidth,
        )


def search(
    num_ranks: int,
    microbatches: Sequence[int],
    load: Load,
    memory_bytes: float = float("inf"),
    max_chunks: int = 4,
) -> list[Simulation]:
    """Try many schedules; return the simulations of those that fit in memory, fastest first.

    Args:
        num_ranks: the number of ranks in the pipeline.
        microbatches: the numbers of micro-batches to try.
        load: the cost of one rank's layers.
        memory_bytes: the limit on each rank's activations, in bytes.
        max_chunks: the maximum number of stages per rank.

    Raises:
        ValueError: no schedule fits.
    """
    found = [
        simulation
        for number in microbatches
        for plan, costs in _candidates(num_ranks, number, load, memory_bytes, max_chunks)
        if max((simulation := simulate(plan, costs=costs)).peak_bytes) <= memory_bytes * (1 + 1e-9)
    ]
    if not found:
        raise ValueError(
            f"no schedule for {num_ranks} ranks keeps its activations within {memory_bytes:g} "
            "bytes: try more micro-batches"
        )
    return sorted(found, key=lambda s: (round(s.makespan, 9), max(s.peak_activations)))


def _candidates(
    num_ranks: int, num_microbatches: int, load: Load, memory_bytes: float, max_chunks: int
) -> Iterator[tuple[Plan, Costs]]:
    for name in NAMES:
        for chunks in range(2, max_chunks + 1) if name in _CHUNKED else (None,):
            plan = schedule(name, num_ranks, num_microbatches, chunks)
            if plan.num_chunks <= max_chunks:
                yield plan, load.costs(num_microbatches, plan.num_chunks)
    down = list(range(num_ranks))
    for chunks in range(1, max_chunks + 1):
        yield from _fitted("loop", down * chunks, chunks, num_microbatches, load, memory_bytes)
    if max_chunks >= 2:
        yield from _fitted("v", down + down[::-1], 2, num_microbatches, load, memory_bytes)


def _fitted(
    shape: str,
    rank_of_stage: list[int],
    num_chunks: int,
    num_microbatches: int,
    load: Load,
    memory_bytes: float,
) -> Iterator[tuple[Plan, Costs]]:
    costs = load.costs(num_microbatches, num_chunks)
    rows = fitted(rank_of_stage, num_microbatches, costs, memory_bytes)
    if rows is not None:
        yield plan_of(rows, f"fitted_{shape}{num_chunks}"), costs
