"""Represent a plan as plain data: one row per rank, with the rank's actions in order.

A plan contains computations. It can also contain messages and sharding actions. If it does not,
`lower.py` adds them. A plan does not contain times. The execution order across ranks follows from
the rows and from the dependencies of each action.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from echelon.dist.pipeline.plan.action import Action, computations

_IDLE = ("", "None")


class PlanError(ValueError):
    """The error for an invalid plan; `row` and `column`, counted from 0, locate the fault.

    Example:
        >>> try:
        ...     simulate(Plan.from_csv("1F0", "late"))
        ... except PlanError as err:
        ...     print(err.row, err.column)
        0 0
    """

    def __init__(self, message: str, row: int, column: int) -> None:
        super().__init__(f"row {row}, column {column}: {message}")
        self.row = row
        self.column = column


@dataclass(frozen=True)
class Plan:
    """A schedule for given numbers of ranks and micro-batches. Immutable by convention.

    Attributes:
        name: the name of the schedule, or of the file from which it was read.
        rows: each rank's actions in order.
        num_microbatches: the number of micro-batches in a step's batch.
        num_chunks: the maximum number of stages on a rank.
        columns: for each row, the column of each action in the plan's file; empty if the columns
            equal the positions in the rows.

    Example:
        >>> plan = schedule("1f1b", num_ranks=2, num_microbatches=2)
        >>> print(plan.to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """

    name: str
    rows: list[list[Action]]
    num_microbatches: int
    num_chunks: int
    columns: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """The number of stages into which the whole model is divided."""
        return len(self.rank_of_stage)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage, determined from the rows."""
        owners = {a.stage: rank for rank, row in enumerate(self.rows) for a in computations(row)}
        return tuple(owners[stage] for stage in sorted(owners))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in order."""
        return tuple(sorted({action.stage for action in computations(self.rows[rank])}))

    def place(self, rank: int, index: int) -> tuple[int, int]:
        """Return the position of an action in the plan's file as (row, column)."""
        return rank, self.columns[rank][index] if self.columns else index

    def to_csv(self) -> str:
        """Return the plan in PyTorch's CSV format: one line per rank, one field per action."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(map(str, row) for row in self.rows)
        return out.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file in the format of `to_csv`."""
        Path(path).write_text(self.to_csv())

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Plan:
        """Parse a plan from CSV text that `to_csv` or PyTorch wrote; empty fields are idle slots.

        Only the text is validated; `check.check_plan` checks that the plan can be executed.

        Raises:
            PlanError: a field is not an action, or there are no actions.
        """
        rows: list[list[Action]] = []
        columns: list[tuple[int, ...]] = []
        for number, fields in enumerate(csv.reader(io.StringIO(text))):
            used = [column for column, field in enumerate(fields) if field.strip() not in _IDLE]
            columns.append(tuple(used))
            rows.append([_parse(fields[column], number, column) for column in used])
        return replace(plan_of(rows, name), columns=tuple(columns))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a CSV file and check that it can be executed.

        Raises:
            PlanError: the plan cannot be executed; the error gives the position of the fault.
            OSError: the file cannot be read.
        """
        from echelon.dist.pipeline.plan.check import check_plan

        plan = cls.from_csv(Path(path).read_text(), Path(path).stem)
        check_plan(plan)
        return plan


def _parse(field: str, row: int, column: int) -> Action:
    try:
        return Action.parse(field)
    except ValueError as err:
        raise PlanError(str(err), row, column) from None


def plan_of(rows: Sequence[Sequence[Action]], name: str) -> Plan:
    """Create a plan from rows, which determine the numbers of micro-batches and chunks.

    Raises:
        PlanError: the rows contain no computation.
    """
    every = [action for row in rows for action in computations(list(row))]
    if not every:
        raise PlanError("the plan contains no computations", 0, 0)
    num_chunks = max(len({a.stage for a in computations(list(row))}) for row in rows)
    return Plan(
        name=name,
        rows=[list(row) for row in rows],
        num_microbatches=1 + max(action.microbatch for action in every),
        num_chunks=num_chunks,
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "8 micro-batches"."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
