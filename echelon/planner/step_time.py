"""Estimate the duration of a layout's step on a given machine, component by component.

The computation time is the number of operations divided by the rate that training reaches. A ring
collective takes one latency per ring step, plus the bytes sent divided by the bandwidth.
Computation hides the communication of `fully_shard` and of replicas as far as the machine's
`overlap` permits, but not the communication of tensor parallelism. A pipeline's idle time is taken
from a simulation of its schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from echelon.planner.layout import Job, Layout
from echelon.planner.machine import Machine
from echelon.planner.model import Model
from echelon.planner.pipeline import Course, course, stages_of
from echelon.planner.work import forward_costs

_OPTIMIZER_BYTES = 32  # AdamW reads and writes weights and moments, and reads gradients twice
_GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The components of a step's duration, in seconds.

    Attributes:
        compute: the computation time of the rank with the most work.
        tensor: the time spent in tensor-parallel collectives.
        exposed: the time for gathers and reductions, minus the part that overlaps with computation.
        bubble: the time that the rank with the most work spends waiting for other stages and for
            messages between stages.
        optimizer: the time to read and write weights, gradients and the optimizer's state.
    """

    compute: float
    tensor: float
    exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all components."""
        return math.fsum(getattr(self, field.name) for field in fields(self))


def step_time(model: Model, layout: Layout, job: Job, machine: Machine) -> StepTime:
    """Estimate the duration of a step, using the likely value of each property of the machine."""
    tokens = job.batch // layout.data // layout.microbatches * job.context
    shares = forward_costs(model, layout, job.context)
    backward = 3.0 if layout.recompute else 2.0
    whole_s = model.train_flops(job.context) / 3 * tokens / layout.tp / machine.flops_per_s.likely
    run = _course(layout, shares, backward)
    blocks_s = (1 + backward) * machine.block_s.likely * layout.microbatches
    per_rank = -(-model.layers // layout.pp)
    compute = run.busiest * whole_s + blocks_s * per_rank
    tensor = _tensor_s(model, layout, job, machine, tokens, per_rank)
    bubble = (run.makespan / run.busiest - 1) * (compute + tensor)
    parameters = _most_parameters(model, layout)
    return StepTime(
        compute=compute,
        tensor=tensor,
        exposed=_exposed_s(model, layout, job, machine, compute),
        bubble=bubble + _messages_s(model, layout, job, machine, tokens),
        optimizer=parameters / layout.shard * _OPTIMIZER_BYTES / machine.bytes_per_s.likely,
    )


def _course(layout: Layout, shares: tuple[float, ...], backward: float) -> Course:
    if layout.pp > 1:
        return course(
            layout.schedule, layout.pp, layout.microbatches, layout.chunks, shares, backward
        )
    busy = layout.microbatches * (1 + backward) * sum(shares)
    return Course(busy, busy, (1,))


def _ring_s(
    machine: Machine, layout: Layout, job: Job, axis: str, num_bytes: float, num_calls: float
) -> float:
    """Return the time in seconds for ring all_gathers or reduce_scatters.

    `num_bytes` is the total size of the full vectors of all `num_calls` calls.
    """
    size = int(getattr(layout, axis))
    if size == 1:
        return 0.0
    is_across = layout.spans(axis) > job.ranks_per_node
    link = machine.link(size, is_across=is_across)
    steps = size - 1
    return (
        num_calls * steps * link.latency_s.likely
        + steps / size * num_bytes / link.bytes_per_s.likely
    )


def _tensor_s(
    model: Model, layout: Layout, job: Job, machine: Machine, tokens: int, num_blocks: int
) -> float:
    """Return the time in seconds for two all_reduces per block in each pass.

    The number of all_reduces is from Megatron-LM (Shoeybi et al. 2019).
    """
    num_calls = 2 * (3 if layout.recompute else 2) * num_blocks * layout.microbatches
    num_bytes = num_calls * tokens * model.width * job.compute_bytes
    return 2 * _ring_s(machine, layout, job, "tp", num_bytes, num_calls)


def _most_parameters(model: Model, layout: Layout) -> float:
    """Return the largest number of parameters that any rank would hold without sharding."""
    stages = stages_of(layout, model)
    held = [0.0] * layout.pp
    for stage, owner in enumerate(stages.rank_of_stage):
        held[owner] += stages.blocks[stage] * model.block_matrices / layout.tp
    matrix = model.vocabulary * model.width
    held[stages.rank_of_stage[0]] += model.first_parameters
    held[stages.rank_of_stage[-1]] += matrix if layout.pp > 1 or not model.is_tied else 0
    return max(held)


def _exposed_s(model: Model, layout: Layout, job: Job, machine: Machine, compute_s: float) -> float:
    """Return how much longer a step takes because of gathers and gradient reductions."""
    if layout.data == 1:
        return 0.0
    parameters = _most_parameters(model, layout)
    num_units = -(-model.layers // layout.pp) + 1
    # A pipeline keeps a stage's parameters throughout its step; otherwise each micro-batch gathers
    # twice.
    num_gathers = 1 if layout.pp > 1 else 2 * layout.microbatches
    gather = num_gathers * _ring_s(
        machine, layout, job, "shard", parameters * job.compute_bytes, num_units
    )
    gradients = parameters * _GRADIENT_BYTES
    reduce = _ring_s(machine, layout, job, "shard", gradients, num_units)
    reduce += 2 * _ring_s(machine, layout, job, "replicate", gradients / layout.shard, num_units)
    overlap = machine.overlap.likely
    forward_s = compute_s / (4 if layout.recompute else 3)
    behind_forward = min(gather / 2, forward_s) * overlap
    behind_backward = min(gather / 2 + reduce, compute_s - forward_s) * overlap
    # The first gather and the last reduction cannot be hidden behind anything.
    least = (gather / num_gathers + reduce) / num_units
    return max(gather + reduce - behind_forward - behind_backward, least)


def _messages_s(model: Model, layout: Layout, job: Job, machine: Machine, tokens: int) -> float:
    """Return the time that messages between stages add to one forward and one backward pass."""
    if layout.pp == 1:
        return 0.0
    link = machine.link(2, is_across=layout.spans("pp") > job.ranks_per_node)
    num_bytes = tokens * model.width * job.compute_bytes
    one_s = link.latency_s.likely + num_bytes / link.bytes_per_s.likely
    return 2 * (layout.pp * layout.chunks - 1) * one_s
