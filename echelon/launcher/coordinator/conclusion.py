"""Determine why a job ended, and which exit code its launchers return."""

from __future__ import annotations

from typing import Any

from echelon.launcher.coordinator.decide import EndAttempt, EndedBy
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import EXIT_STALL, Report, exit_code


def conclude(
    world: World, end: EndAttempt, report: Report, stop_signal: int
) -> tuple[EndedBy, int]:
    """Fill in the run report once the job's last world has ended.

    Args:
        stop_signal: the signal that the user sent to end the job; 0 for none.

    Returns:
        What ended the job, and the exit code for all of its launchers.
    """
    if not end.failed:
        for incident in report.incidents:
            incident.recovered = True
        return EndedBy.WORKER, 0
    if world.unkillable:
        shown = "; ".join(f"rank {r}: {why}" for r, why in sorted(world.unkillable.items()))
        report.error = f"ranks that cannot be killed were left behind: {shown}"
        return EndedBy.AGENT, 1
    if end.ended_by is EndedBy.STALL:
        return EndedBy.STALL, EXIT_STALL
    if stop_signal or end.ended_by in (EndedBy.SIGNAL, EndedBy.LEAVE):
        return EndedBy.SIGNAL, 128 + (stop_signal or next(iter(world.leaving.values())))
    last: Any = report.incidents[-1].verdict if report.incidents else None
    ended = [one for one in world.ended.values() if not one.epoch]
    return EndedBy.WORKER, exit_code(ended, last) or 1
