"""Draw a simulated plan as text, with one line per time step and one column per rank."""

from __future__ import annotations

from itertools import pairwise

from echelon.dist.pipeline.plan.plan import counted
from echelon.dist.pipeline.simulation.simulator import Simulation, Slot

_MOST_LINES = 2000


def draw_grid(simulation: Simulation, step: float | None = None) -> str:
    """Draw the schedule as a grid with a column for each rank and time running downward.

    The cell in which an action starts contains the action's text. `|` means that the action is
    still running, and `.` means that the rank is idle.

    Args:
        simulation: the simulation to show.
        step: the time that one line represents; None means the duration of the shortest action.

    Raises:
        ValueError: the grid would have more than 2000 lines.
    """
    every = [slot for row in simulation.slots for slot in row if slot.end > slot.start]
    step = step or min((slot.end - slot.start for slot in every), default=1.0)
    origin = min((slot.start for slot in every), default=0.0)
    num_lines = max(1, round(simulation.makespan / step))
    if num_lines > _MOST_LINES:
        raise ValueError(f"a grid of {num_lines} lines is too long: pass a longer step")
    columns = [_column(list(row), num_lines, step, origin) for row in simulation.slots]
    widths = [
        max(len(f"rank {rank}"), *(len(cell) for cell in column))
        for rank, column in enumerate(columns)
    ]
    label = len(str(num_lines - 1))
    head = " ".join(f"rank {rank}".ljust(width) for rank, width in enumerate(widths))
    lines = [f"{'':{label}}  {head}".rstrip()]
    for number in range(num_lines):
        cells = " ".join(
            column[number].ljust(width) for column, width in zip(columns, widths, strict=True)
        )
        lines.append(f"{number:{label}}  {cells}".rstrip())
    return "\n".join(lines)


def _column(slots: list[Slot], num_lines: int, step: float, origin: float) -> list[str]:
    cells = ["."] * num_lines
    for slot in slots:
        first = min(int((slot.start - origin) / step + 1e-6), num_lines - 1)
        last = min(int((slot.end - origin) / step - 1e-6), num_lines - 1)
        for number in range(first + 1, last + 1):
            cells[number] = "|"
        begun = cells[first]
        text = "+".join(str(part) for part in slot.action.computations)
        cells[first] = text if begun in (".", "|") else f"{begun},{text}"
    return cells


def draw_summary(simulation: Simulation) -> str:
    """Return three lines of text: the plan's size, its key figures, and its critical path."""
    plan = simulation.plan
    peaks = ", ".join(str(peak) for peak in simulation.peak_activations)
    path = simulation.critical_path
    hops = sum(one.rank != other.rank for one, other in pairwise(path))
    return (
        f"{plan.name}: {counted(plan.num_ranks, 'rank')}, "
        f"{counted(plan.num_microbatches, 'micro-batch')}, {counted(plan.num_chunks, 'chunk')} "
        "per rank\n"
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble:.1%}, "
        f"peak activations per rank: {peaks}\n"
        f"critical path: {len(path)} actions from {path[0].action} to {path[-1].action}, "
        f"{hops} changes of rank"
    )
