"""Create the plan of a schedule, given its name."""

from __future__ import annotations

from collections.abc import Callable

from echelon.dist.pipeline.plan.action import Action
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.pipeline.plan.schedules.dualpipev import dualpipev
from echelon.dist.pipeline.plan.schedules.gpipe import gpipe
from echelon.dist.pipeline.plan.schedules.interleaved_1f1b import interleaved_1f1b
from echelon.dist.pipeline.plan.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from echelon.dist.pipeline.plan.schedules.looped_bfs import looped_bfs
from echelon.dist.pipeline.plan.schedules.one_f_one_b import one_f_one_b
from echelon.dist.pipeline.plan.schedules.zbv import zbv

Rows = list[list[Action]]

# Their number of chunks a rank is part of what they are ...
_FIXED: dict[str, tuple[Callable[[int, int], Rows], int]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zbv": (zbv, 2),
    "dualpipev": (dualpipev, 2),
}
# ... or free.
_CHUNKED: dict[str, Callable[[int, int, int], Rows]] = {
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "interleaved_zero_bubble": interleaved_zero_bubble,
}
_DEFAULT_CHUNKS = 2
NAMES = ("gpipe", "1f1b", *_CHUNKED, "zbv", "dualpipev")


def schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Plan:
    """Return the plan of a named schedule.

    Args:
        name: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or
            dualpipev.
        num_ranks: the number of ranks in the pipeline, 1 or more.
        num_microbatches: the number of micro-batches, 1 or more; can be smaller than the number of
            ranks or stages.
        num_chunks: the number of stages per rank; None means 1 for gpipe and 1f1b, and 2 for other
            schedules. Only the interleaved and looped schedules accept other numbers.

    Raises:
        ValueError: the schedule is unknown, or is not defined for these numbers.

    Example:
        >>> plan = schedule("zbv", num_ranks=2, num_microbatches=4)
        >>> plan.num_stages, plan.stages_of(0)
        (4, (0, 3))
    """
    if name not in NAMES:
        raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(NAMES)}")
    _check_number("num_ranks", num_ranks)
    _check_number("num_microbatches", num_microbatches)
    if name in _CHUNKED:
        chunks = _DEFAULT_CHUNKS if num_chunks is None else num_chunks
        _check_number("num_chunks", chunks)
        rows = _CHUNKED[name](num_ranks, num_microbatches, chunks)
    else:
        make, chunks = _FIXED[name]
        if num_chunks not in (None, chunks):
            raise ValueError(f"num_chunks must be {chunks} for {name}, got {num_chunks}")
        rows = make(num_ranks, num_microbatches)
    return Plan(name, rows, num_microbatches, chunks)


def _check_number(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{what} must be an integer >= 1, got {number!r}")
