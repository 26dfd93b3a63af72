"""Define the restart policy's table, which `docs/restarts.md` shows.

A failure is handled by the first row that matches it. The column `repeats` limits how often the
same failure can recur before the job completes a new step: with 0, the job stops at the first
occurrence; with 1, it stops at the second; with None, only `--max-restarts` limits the restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from echelon.launcher.coordinator.policy.failure import DEAD, MEMORY, Failure

_DIFFERS = (
    "op_mismatch",
    "shape_mismatch",
    "dtype_mismatch",
    "reduce_op_mismatch",
    "root_mismatch",
    "split_mismatch",
    "skipped_collective",
    "order_desync",
    "p2p_unmatched",
)


PATIENCE = 3  # stall timeouts that a stall has to end by itself, if its cause allows that


class Evidence(Enum):
    """The evidence that a row requires, in addition to the cause."""

    ANY = "any"
    LIKELY = "the verdict is at least `likely`"
    OUTSIDE = "the error names the network or a file system"
    OWN_MEMORY = "the job's own use reached the limit"
    KILLED = "a signal ended it, or its node is lost"


class Pause(Enum):
    """The conditions for a pause before the next attempt."""

    IF_REPEATED = "after repetitions"  # none before the first repetition
    ALWAYS = "always"  # an external cause needs time to recover


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table, which covers one or more causes.

    Attributes:
        causes: the causes that the row covers; () means all causes that no other row covers.
        blames_node: whether failures count against the culprit's node (`--exclude-after`).
        may_pass: whether a stall with one of these causes can clear on its own. If so, `--on-stall
            restart` waits for a while before it restarts the job.
        why: the reason given in the message "no restart: ...".
    """

    causes: tuple[str, ...]
    evidence: Evidence = Evidence.ANY
    repeats: int | None
    pause: Pause = Pause.IF_REPEATED
    blames_node: bool = False
    may_pass: bool = False
    why: str

    def fits(self, failure: Failure) -> bool:
        """Return whether the row applies to a failure."""
        if self.causes and failure.cause not in self.causes:
            return False
        return {
            Evidence.ANY: True,
            Evidence.LIKELY: failure.is_likely,
            Evidence.OUTSIDE: failure.is_outside,
            Evidence.OWN_MEMORY: failure.owns_memory is True,
            Evidence.KILLED: failure.is_killed,
        }[self.evidence]


TABLE = (
    Row(
        causes=_DIFFERS,
        evidence=Evidence.LIKELY,
        repeats=0,
        why="the ranks' programs differ, and would differ again",
    ),
    Row(causes=_DIFFERS, repeats=1, why="the ranks' programs differ again"),
    Row(
        causes=("exception",),
        evidence=Evidence.OUTSIDE,
        repeats=None,
        pause=Pause.ALWAYS,
        why="a network or a file system may recover",
    ),
    Row(causes=("exception",), repeats=1, why="the same line raised the same error again"),
    Row(
        causes=(MEMORY,),
        evidence=Evidence.OWN_MEMORY,
        repeats=0,
        why="the job needs more memory than its limit",
    ),
    Row(causes=(MEMORY,), repeats=1, blames_node=True, why="memory ran out again"),
    Row(
        causes=(DEAD,),
        evidence=Evidence.KILLED,
        repeats=None,
        blames_node=True,
        why="something outside the program ended it",
    ),
    Row(causes=(DEAD,), repeats=2, why="the program keeps ending itself"),
    Row(
        causes=("device_stuck",),
        repeats=None,
        blames_node=True,
        why="this device, or another one, may work",
    ),
    Row(
        causes=("frozen_process",),
        repeats=None,
        blames_node=True,
        why="something outside the program stopped it",
    ),
    Row(
        causes=("host_hang", "gil_hang"),
        repeats=2,
        why="the program keeps hanging at the same place",
    ),
    Row(
        causes=("compile_stall",),
        repeats=2,
        may_pass=True,
        why="the program keeps compiling without end",
    ),
    Row(
        causes=("network",),
        repeats=None,
        pause=Pause.ALWAYS,
        blames_node=True,
        may_pass=True,
        why="a network may recover",
    ),
    Row(
        causes=("storage_stall", "store_wait", "data_starvation"),
        repeats=None,
        pause=Pause.ALWAYS,
        may_pass=True,
        why="storage may recover",
    ),
    Row(causes=("straggler",), repeats=None, may_pass=True, why="a slow rank still works"),
    Row(
        causes=(),
        repeats=None,
        may_pass=True,
        why="the cause is not known, so each restart counts",
    ),
)


def row_for(failure: Failure) -> Row:
    """Return the first row that applies to a failure."""
    return next(row for row in TABLE if row.fits(failure))


def may_pass(cause: str) -> bool:
    """Return whether a stall with the given cause can clear on its own."""
    return next((row for row in TABLE if cause in row.causes), TABLE[-1]).may_pass


def to_markdown() -> str:
    """Return the table as Markdown, exactly as it appears in `docs/restarts.md`."""
    columns = "cause | evidence | follows | pause | counts against the node | a stall of it"
    lines = [f"| {columns} |", "|" + "---|" * 6]
    for row in TABLE:
        causes = ", ".join(f"`{cause}`" for cause in row.causes) or "anything else"
        blames = "yes" if row.blames_node else "no"
        ends = "may pass" if row.may_pass else "ends the ranks"
        columns = f"{_follows(row)} | {row.pause.value} | {blames} | {ends}"
        lines.append(f"| {causes} | {row.evidence.value} | {columns} |")
    return "\n".join(lines) + "\n"


def _follows(row: Row) -> str:
    times = {0: "stop at once", 1: "restart; stop when it repeats"}
    if row.repeats is None:
        return "restart, up to `--max-restarts`"
    return times.get(row.repeats, f"restart; stop at repetition {row.repeats}")
