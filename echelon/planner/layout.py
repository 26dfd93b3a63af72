"""Describe and enumerate layouts. A layout is a way to split a step's work across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.planner.model import Model

_MAX_STAGES = 16
_MAX_MICROBATCHES = 128
_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv", 2))


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a training step, and the ranks that perform it.

    Attributes:
        ranks: the number of ranks in the whole job.
        ranks_per_node: the number of consecutive ranks that share a node and its fast links.
        batch: the number of sequences per step, over all ranks.
        context: the number of tokens in a sequence.
        compute_bytes: the size in bytes of an element in the compute dtype: 2 (bf16) or 4.
        loss_chunks: the number of chunks in which logits are computed and freed; with 1, all logits
            are computed at once.
        on_host: whether the ranks compute on CPUs, in host memory.
    """

    ranks: int
    ranks_per_node: int
    batch: int
    context: int
    compute_bytes: int = 4
    loss_chunks: int = 1
    on_host: bool = False

    def __post_init__(self) -> None:
        """Check that all numbers are valid.

        Raises:
            ValueError: a number is below 1, or the nodes do not all have the same number of ranks.
        """
        for name in ("ranks", "ranks_per_node", "batch", "context", "loss_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks must be a multiple of ranks_per_node ({self.ranks_per_node}), got "
                f"{self.ranks}"
            )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh for `parallelize`, with the schedule and the number of micro-batches in a step.

    Attributes:
        pp, replicate, shard, tp: the number of ranks along each axis, outermost axis first.
        schedule, chunks: the pipeline's schedule and its number of chunks per rank; "" and 1
            without a pipeline.
        microbatches: the number of micro-batches into which each data-parallel rank splits its
            local batch.
        recompute: whether blocks store only their inputs, so that the backward pass recomputes all
            other activations.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    schedule: str = ""
    chunks: int = 1
    microbatches: int = 1
    recompute: bool = False

    @property
    def data(self) -> int:
        """The number of ranks across which the batch is split."""
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        """The layout as text, such as `pp 2 x shard 4, 1f1b, 8 micro-batches`."""
        axes = [
            f"{axis} {size}"
            for axis, size in (
                ("pp", self.pp),
                ("replicate", self.replicate),
                ("shard", self.shard),
                ("tp", self.tp),
            )
            if size > 1
        ]
        parts = [" x ".join(axes) or "one rank"]
        if self.schedule:
            parts.append(self.schedule)
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} micro-batches")
        if self.recompute:
            parts.append("recompute")
        return ", ".join(parts)

    def spans(self, axis: str) -> int:
        """Return the number of consecutive ranks that a group along an axis spans."""
        if axis == "tp":
            return self.tp
        if axis == "shard":
            return self.shard * self.tp
        if axis == "replicate":
            return self.data * self.tp
        return self.pp * self.data * self.tp


def layouts(model: Model, job: Job) -> Iterator[Layout]:
    """Yield the layouts that split the ranks, the batch and the model evenly."""
    for pp in _divisors(job.ranks):
        if pp > min(model.layers, _MAX_STAGES):
            continue
        for tp in _divisors(job.ranks // pp):
            if tp > job.ranks_per_node or not _is_divisible(model, tp):
                continue
            for shard in _divisors(job.ranks // pp // tp):
                replicate = job.ranks // pp // tp // shard
                if job.batch % (replicate * shard) == 0:
                    share = job.batch // (replicate * shard)
                    mesh = Layout(pp=pp, replicate=replicate, shard=shard, tp=tp)
                    yield from _ways(mesh, model, share)


def _ways(mesh: Layout, model: Model, share: int) -> Iterator[Layout]:
    """Yield a layout for each schedule and micro-batch count, with and without recomputation."""
    sizes = vars(mesh) | {"schedule": "", "chunks": 1}
    numbers = [m for m in _divisors(share) if m <= _MAX_MICROBATCHES]
    for schedule, chunks in _SCHEDULES if mesh.pp > 1 else (("", 1),):
        if mesh.pp * chunks > model.layers:
            continue
        for number in numbers:
            if mesh.pp > 1 and (number % mesh.pp or number > (8 if mesh.pp <= 4 else 4) * mesh.pp):
                continue  # fewer than ranks leave most of them idle; chunks need a multiple
            for recompute in (False, True):
                yield Layout(
                    **sizes | {"schedule": schedule, "chunks": chunks, "microbatches": number,
                               "recompute": recompute}
                )  # fmt: skip


def _is_divisible(model: Model, tp: int) -> bool:
    return not (model.heads % tp or model.kv_heads % tp or model.hidden % tp)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
