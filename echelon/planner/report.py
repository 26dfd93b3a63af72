"""Render the outcome of planning as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from echelon.planner.layout import Job
from echelon.planner.machine import Machine
from echelon.planner.memory import HEAP_ERROR, Memory
from echelon.planner.model import Model
from echelon.planner.planner import NUM_DRAWS, RESERVE, Candidate, Outcome

_GIB = 1 << 30


def as_text(
    model: Model, job: Job, machine: Machine, outcome: Outcome, memory_bytes: float, num_shown: int
) -> str:
    """Return the report: a table, details of the first layout, and the estimates' uncertainty."""
    return "\n".join(_lines(model, job, machine, outcome, memory_bytes, num_shown))


def _lines(
    model: Model, job: Job, machine: Machine, outcome: Outcome, memory_bytes: float, num_shown: int
) -> Iterator[str]:
    kind = "bf16 over fp32" if job.compute_bytes == 2 else "fp32"
    yield (
        f"{model.num_parameters / 1e6:,.1f}M parameters on {job.ranks} ranks of "
        f"{memory_bytes / _GIB:g} GiB, {job.batch} x {job.context} tokens per step, {kind}, AdamW"
    )
    for what, origin in machine.origins.items():
        yield f"{what}: {origin}"
    yield f"{outcome.num_fitting} of {outcome.num_layouts} layouts fit"
    if outcome.smallest is not None and not outcome.candidates:
        layout, needed = outcome.smallest
        yield f"the smallest is {layout.name}: {needed.total / _GIB:.2f} GiB"
        yield from _parts("memory", asdict(needed), 1 / _GIB, "GiB")
        return
    yield ""
    yield from _table(job, outcome.candidates[:num_shown])
    hidden = len(outcome.candidates) - num_shown
    if hidden > 0:
        yield f"   and {hidden} more (--top)"
    yield ""
    first = outcome.candidates[0]
    yield f"first: {first.layout.name}"
    yield from _parts("memory", asdict(first.memory), 1 / _GIB, "GiB")
    yield from _parts("step", asdict(first.time), 1.0, "s")
    yield ""
    yield _how_sure(outcome.candidates)
    yield _how_sure_of_memory(job)


def _table(job: Job, candidates: tuple[Candidate, ...]) -> Iterator[str]:
    names = [one.layout.name for one in candidates]
    width = max(len("layout"), *(len(name) for name in names))
    head = f"{'GiB':>6}  {'step s':>8}  {'9 in 10 within':>16}  {'tokens/s':>9}"
    yield f"    {'layout':{width}}  {head}"
    for number, (one, name) in enumerate(zip(candidates, names, strict=True), 1):
        low, likely, high = one.step_s
        mark = "=" if one.is_tie else str(number)
        within = f"{_seconds(low)} - {_seconds(high)}"
        tokens = job.batch * job.context / likely
        yield (
            f"{mark:>3} {name:{width}}  {one.memory.total / _GIB:6.2f}  {_seconds(likely):>8}  "
            f"{within:>16}  {tokens:9,.0f}"
        )


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _parts(title: str, parts: dict[str, float], scale: float, unit: str) -> Iterator[str]:
    shown = [f"{name} {_seconds(value * scale)}" for name, value in parts.items() if value > 0]
    yield f"  {title}, {unit}: {', '.join(shown)}"


def _how_sure(candidates: tuple[Candidate, ...]) -> str:
    first = candidates[0]
    ties = [one for one in candidates if one.is_tie]
    share = f"{first.wins:.0%} of {NUM_DRAWS} draws of the figures above"
    if not ties:
        return f"how sure: {first.layout.name} is the fastest in {share}"
    return (
        f"how sure: not certain. {first.layout.name} is the fastest in {share};\n"
        f"{len(ties)} more, marked =, cannot be distinguished from it: measure them"
    )


def _how_sure_of_memory(job: Job) -> str:
    if job.on_host:
        return f"memory: within {HEAP_ERROR:.0%} of the jobs measured (15.7M parameters, on a CPU)"
    return (
        f"memory: of tensors; what the allocator loses was not measured, {RESERVE:.0%} is left free"
    )


def as_json(job: Job, machine: Machine, outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as plain values, with sizes in bytes and times in seconds."""

    def described(memory: Memory) -> dict[str, float]:
        parts = {field.name: getattr(memory, field.name) for field in fields(memory)}
        return {**parts, "total": memory.total}

    found = []
    for one in outcome.candidates:
        low, likely, high = one.step_s
        found.append(
            {
                "layout": asdict(one.layout),
                "name": one.layout.name,
                "memory_bytes": described(one.memory),
                "step_s": {"likely": likely, "low": low, "high": high, **asdict(one.time)},
                "wins": one.wins,
                "is_tie": one.is_tie,
            }
        )
    smallest = None
    if outcome.smallest is not None:
        layout, needed = outcome.smallest
        smallest = {"layout": asdict(layout), "memory_bytes": described(needed)}
    return {
        "job": asdict(job),
        "origins": dict(machine.origins),
        "num_layouts": outcome.num_layouts,
        "num_fitting": outcome.num_fitting,
        "candidates": found,
        "smallest_that_does_not_fit": smallest,
    }
