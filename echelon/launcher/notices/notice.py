"""Create notices (JSON objects) about a job's incidents, restarts and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from echelon.launcher.coordinator import observers as o

FORMAT = 1


class Notices:
    """A converter that creates notices from the events of one job.

    Args:
        run_dir: the run directory, as shown to the user.
        host: the name of the hosting node.
        wall_s: a function that returns the wall-clock time, in seconds since 1970.
    """

    def __init__(
        self, job_id: str, run_dir: str, host: str, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._job = {"job_id": job_id, "run_dir": run_dir, "host": host}
        self._wall_s = wall_s
        self._restarts = 0

    def of(self, happening: o.Happening) -> dict[str, Any] | None:
        """Return the notice about an event, or None if the event does not need one."""
        if isinstance(happening, o.VerdictKnown):
            return self._made("incident", **_of_incident(happening))
        if isinstance(happening, o.Restarting):
            self._restarts += 1
            return self._made(
                "restart",
                attempt=happening.attempt,
                decision=happening.decision,
                restarts=self._restarts,
            )
        if isinstance(happening, o.JobEnded):
            return self._made(
                "end",
                ended_by=happening.ended_by,
                exit_code=happening.exit_code,
                error=happening.error,
                restarts=self._restarts,
            )
        return None

    def _made(self, event: str, **more: Any) -> dict[str, Any]:
        return {"format": FORMAT, "event": event, "time_s": self._wall_s(), **self._job, **more}


def _of_incident(known: o.VerdictKnown) -> dict[str, Any]:
    incident = known.incident
    return {
        "attempt": incident.attempt,
        "kind": incident.kind,
        "reason": incident.reason,
        "folder": incident.folder.name,
        "withdrawn": incident.withdrawn,
        "verdict": incident.verdict,
        "root_cause": incident.root_cause,
        "victims": incident.victims,
    }
