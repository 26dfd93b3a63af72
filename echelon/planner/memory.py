"""Estimate the memory that a layout needs on a rank, component by component.

Weights, gradients and AdamW's state take 4 + 4 + 8 bytes per parameter (ZeRO, Rajbhandari et al.
2020, with weights stored in fp32), divided by the size of the "shard" axis. The buffers of
`fully_shard` are described in docs/sharding.md, "The budget". Activations are counted tensor by
tensor for this repository's blocks, whose attention does not store scores (Korthikanti et al. 2022,
table 2, without dropout).

[Note: the heap] In host memory, a rank uses more memory than its tensors do. `echelon.dist.heap`
makes glibc retain freed blocks, which saves page faults. However, blocks of many sizes leave gaps
between them. With every block mapped separately (MALLOC_MMAP_THRESHOLD_=131072), the peak resident
memory was the sum of the other components plus 10 to 20 MiB. The estimate of the heap was fitted to
13 measured jobs (docs/planner.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from echelon.planner.layout import Job, Layout
from echelon.planner.model import Model
from echelon.planner.pipeline import course, stages_of
from echelon.planner.work import forward_costs

_STATE_BYTES = 4  # of weights, of gradients, of each of AdamW's two moments
_UNITS_GATHERED = 4
_BUFFERS_REDUCED = 3
# [Note: the heap]
_HEAP_SHARE = 0.3  # share of what each step allocates and frees
_HEAP_BYTES = 25 << 20  # buffers of messages, code that the first step loads
HEAP_ERROR = 0.1  # of the total: the largest deviation of the fit from the measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory use, in bytes, of the rank that needs the most memory.

    Attributes:
        weights, optimizer: the rank's shards of the weights and of the optimizer's state.
        gradients: the rank's shards of the gradients at its memory peak. With one micro-batch, each
            gradient reuses the memory of activations that the backward pass has freed.
        units: the buffers of `fully_shard` for gathered parameters, and for full gradients before
            they are reduced.
        activations: the activations stored for the backward pass, over all micro-batches in
            progress.
        logits: the logits and the loss's intermediate tensors.
        heap: in host memory, the gaps between tensors, and small buffers; 0 on accelerators.
    """

    weights: float
    gradients: float
    optimizer: float
    units: float
    activations: float
    logits: float
    heap: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all components."""
        return math.fsum(getattr(self, field.name) for field in fields(self))


def memory(model: Model, layout: Layout, job: Job) -> Memory:
    """Return the memory use of the pipeline rank that needs the most memory."""
    stages = stages_of(layout, model)
    peaks: tuple[int, ...] = (1,)
    if layout.pp > 1:
        costs = forward_costs(model, layout, job.context)
        backward = 3.0 if layout.recompute else 2.0
        peaks = course(
            layout.schedule, layout.pp, layout.microbatches, layout.chunks, costs, backward
        ).peaks
    every = [
        _of_rank(model, layout, job, stages.blocks, stages.of_rank(rank), peaks[rank])
        for rank in range(layout.pp)
    ]
    return max(every, key=lambda one: one.total)


def _of_rank(
    model: Model, layout: Layout, job: Job, blocks: tuple[int, ...], own: list[int], peak: int
) -> Memory:
    num_blocks = sum(blocks[stage] for stage in own)
    has_first, has_last = 0 in own, len(blocks) - 1 in own
    unit = model.block_matrices / layout.tp + 2 * model.width
    root = _ends(model, layout, has_first=has_first, has_last=has_last)
    parameters = num_blocks * unit + root
    tokens = job.batch // layout.data // layout.microbatches * job.context
    per_block = activation_bytes(model, layout.tp, job.compute_bytes) * tokens
    # A peak counts pairs of stage and micro-batch; this rank's stages differ by one block at most.
    kept = peak * num_blocks / len(own) * per_block
    if layout.recompute:
        kept = peak * num_blocks / len(own) * model.width * job.compute_bytes * tokens + per_block
    kept += tokens * model.width * job.compute_bytes * 2 if has_last else 0
    logits = logits_bytes(model, job) * tokens if has_last else 0.0
    gradients, moving = _STATE_BYTES * parameters / layout.shard, kept + logits
    if layout.microbatches == 1:
        gradients = max(0.0, gradients + per_block - moving)  # backward frees the first block last
    else:
        moving += _STATE_BYTES * parameters  # of all micro-batches, summed before the reduction
    return Memory(
        weights=_STATE_BYTES * parameters / layout.shard,
        gradients=gradients,
        optimizer=2 * _STATE_BYTES * parameters / layout.shard,
        units=_units(layout, job, unit, root, num_blocks),
        activations=kept,
        logits=logits,
        heap=_HEAP_BYTES + _HEAP_SHARE * moving if job.on_host else 0.0,
    )


def _ends(model: Model, layout: Layout, *, has_first: bool, has_last: bool) -> float:
    """Return the number of parameters in a rank's embeddings, final norm and head."""
    divisor = layout.tp if model.vocabulary % layout.tp == 0 else 1
    matrix = model.vocabulary * model.width / divisor
    first = matrix + (model.context * model.width if model.learns_positions else 0)
    is_copied = model.is_tied and not has_first  # each of the two stages has the tied matrix
    last = model.width + (matrix if is_copied or not model.is_tied else 0)
    return (first if has_first else 0.0) + (last if has_last else 0.0)


def _units(layout: Layout, job: Job, unit: float, root: float, num_blocks: int) -> float:
    """Return the size in bytes of gathered parameters and of gradients that are not yet reduced."""
    if layout.data == 1 and job.compute_bytes == _STATE_BYTES:
        return 0.0  # nothing is gathered, cast or reduced
    whole = num_blocks * unit + root
    gathered = (min(num_blocks, _UNITS_GATHERED) * unit + root) * job.compute_bytes
    reduced = (min(num_blocks, _BUFFERS_REDUCED) * unit + root) * _STATE_BYTES
    if layout.pp > 1:  # a stage is kept through its micro-batches
        gathered = whole * job.compute_bytes
    if layout.microbatches > 1:  # summed whole, reduced with the last one
        reduced = whole * _STATE_BYTES + unit * _STATE_BYTES
    return gathered + reduced


def activation_bytes(model: Model, tp: int, compute_bytes: int) -> float:
    """Return how many bytes of activations a block of `echelon.train.models` stores per token.

    A block stores the inputs and outputs of the norms (RMSNorm computes in fp32), the operands and
    result of attention (a model with rotary position embeddings stores the result twice), and the
    tensors inside the feed-forward network. Tensor parallelism splits everything except the tensors
    of the norms. Kernels that fuse these operations store less.
    """
    if model.is_gated:
        norms = 2 * (model.width * (4 + 2 * compute_bytes) + 4)
    else:
        norms = 2 * (model.width * 2 * compute_bytes + 8)
    num_mixtures = 1 if model.learns_positions else 2
    attention = (1 + num_mixtures) * model.query_width + 2 * model.key_width
    mlp = (4 if model.is_gated else 2) * model.hidden
    return norms + (compute_bytes * (attention + mlp) + 4 * model.heads) / tp


def logits_bytes(model: Model, job: Job) -> float:
    """Return the loss's peak memory per token, in bytes.

    At its peak, the loss needs the logits in the compute dtype and in fp32 (if these differ), and
    the log-softmax and its gradient in fp32.
    """
    copies = job.compute_bytes + 8 + (4 if job.compute_bytes < _STATE_BYTES else 0)
    return model.vocabulary * copies / job.loss_chunks
