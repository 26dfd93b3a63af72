"""Read the ranks' current activity from their rings. This works even if a rank hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import DumpFormatError
from echelon.host.identity import boot_id, find_process
from echelon.recorder.format.schema import Live, Record, State
from echelon.recorder.read import read_ring

_STEPS_AVERAGED = 20
_PENDING = (State.CREATED, State.STARTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The current activity of one rank. Durations are in seconds; None means unknown."""

    rank: int
    phase: str
    operation: str
    sequence: int | None
    lag_s: float | None  # since it last began or ended an operation, span or step
    step: int | None
    step_s: float | None

    def pack(self) -> tuple[list[int], list[str]]:
        """Encode the status as the numbers and strings that nodes exchange; None becomes -1."""
        return [
            self.rank,
            _number(self.sequence),
            _number(self.lag_s, 1e3),
            _number(self.step),
            _number(self.step_s, 1e6),
        ], [self.phase, self.operation]

    @classmethod
    def unpack(cls, numbers: Sequence[int], words: Sequence[str]) -> RankStatus:
        """Decode a status that `pack` has encoded.

        Raises:
            ValueError: the number of values is wrong.
        """
        rank, sequence, lag_ms, step, step_us = numbers
        phase, operation = words
        return cls(
            rank=rank,
            phase=phase,
            operation=operation,
            sequence=None if sequence < 0 else sequence,
            lag_s=None if lag_ms < 0 else lag_ms / 1e3,
            step=None if step < 0 else step,
            step_s=None if step_us < 0 else step_us / 1e6,
        )


def newest_run(folder: Path) -> Path | None:
    """Return the directory of the most recently started run; None if the folder has no runs."""
    runs = sorted(folder.glob("*/job*.json"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else None


def ring_paths(run_dir: Path) -> dict[int, Path]:
    """Return the path of each rank's most recent ring, keyed by rank."""
    newest: dict[int, tuple[int, Path]] = {}
    for path in run_dir.glob("rank_*/attempt_*/ring"):
        rank = path.parents[1].name.removeprefix("rank_")
        attempt = path.parent.name.removeprefix("attempt_")
        if rank.isdecimal() and attempt.isdecimal():
            key, number = int(rank), int(attempt)
            if key not in newest or number > newest[key][0]:
                newest[key] = (number, path)
    return {rank: path for rank, (_, path) in sorted(newest.items())}


def status_of(record: Record, now_mono_ns: int) -> RankStatus:
    """Return a rank's current activity, according to its black box.

    `now_mono_ns` is the current time on this host's monotonic clock.
    """
    live = record.live
    operations = record.operations
    operation, sequence, phase = "", None, "compute"
    if len(operations):
        last = operations[-1]
        operation = record.strings[int(last["operation"])]
        sequence = int(last["sequence"] if last["sequence"] >= 0 else last["p2p_sequence"])
        if int(last["state"]) in _PENDING:
            phase = "in operation"
    if phase == "compute" and len(record.open_spans):
        innermost = max(record.open_spans, key=lambda span: int(span["started_mono_ns"]))
        phase = record.strings[int(innermost["name"])]
    if not live[Live.INITIALIZED]:
        phase = "starting"
    if live[Live.CLOSED]:
        phase = "ended"
    progress_ns = live[Live.PROGRESS_MONO_NS]
    return RankStatus(
        rank=record.identity.rank,
        phase=phase,
        operation=operation,
        sequence=sequence,
        lag_s=(now_mono_ns - progress_ns) / 1e9 if progress_ns else None,
        step=live[Live.STEP] - 1 if live[Live.STEP] else None,
        step_s=_step_s(record),
    )


def _step_s(record: Record) -> float | None:
    """Return the mean duration of the last few steps, in seconds; None if unknown.

    A step lasts from its first operation to the first operation of the next step.
    """
    known = record.operations[record.operations["step"] >= 0]
    steps, stamps = known["step"].tolist(), known["created_mono_ns"].tolist()
    firsts = [i for i in range(len(steps)) if i == 0 or steps[i] != steps[i - 1]]
    recent = firsts[-_STEPS_AVERAGED - 1 :]
    if len(recent) < 2:
        return None
    begin, end = recent[0], recent[-1]
    num_steps = max(int(steps[end]) - int(steps[begin]), 1)
    return float(int(stamps[end]) - int(stamps[begin])) / 1e9 / num_steps


def silent(rank: int, phase: str) -> RankStatus:
    """Return the status of a rank whose ring cannot be used."""
    nothing = {"sequence": None, "lag_s": None, "step": None, "step_s": None}
    return RankStatus(rank=rank, phase=phase, operation="", **nothing)


def read_statuses(run_dir: Path) -> list[RankStatus]:
    """Return the status of each rank. If a rank's ring is unusable, its phase is "unreadable"."""
    statuses = []
    for rank, path in ring_paths(run_dir).items():
        try:
            statuses.append(_checked(read_ring(path)))
        except DumpFormatError:
            statuses.append(silent(rank, "unreadable"))
    return statuses


def _checked(record: Record) -> RankStatus:
    """Return a rank's status.

    If the process has ended or was started on another host, `lag_s` is None.
    """
    status = status_of(record, time.monotonic_ns())
    identity = record.identity
    if status.phase == "ended" or not identity.boot_id:
        return status
    if identity.boot_id != boot_id():  # its clock cannot be compared with this machine's
        return replace(status, lag_s=None)
    is_gone = identity.pid and find_process(identity.pid, identity.pid_start_ticks) is None
    return replace(status, phase="gone", lag_s=None) if is_gone else status


def _number(value: float | None, scale: float = 1) -> int:
    return -1 if value is None else int(value * scale)
