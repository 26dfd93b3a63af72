"""Write a simulated plan as a Chrome trace, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from echelon.dist.pipeline.simulation.simulator import Simulation


def draw_trace(simulation: Simulation, us_per_unit: float = 1000.0) -> str:
    """Return the trace as JSON text, with one thread per rank.

    An arrow marks each message that a rank waited for.

    Args:
        simulation: the simulation to show.
        us_per_unit: the number of microseconds in the trace per unit of time in the costs.
    """
    critical = {(slot.rank, slot.action) for slot in simulation.critical_path}
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(simulation.slots):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        for slot in row:
            kinds = "+".join(part.kind.value for part in slot.action.computations)
            is_critical = (rank, slot.action) in critical
            events.append(
                {
                    "ph": "X", "name": str(slot.action), "cat": kinds, "pid": 0, "tid": rank,
                    "ts": slot.start * us_per_unit, "dur": (slot.end - slot.start) * us_per_unit,
                    "args": {"idle_before": slot.idle, "critical": is_critical},
                }
            )  # fmt: skip
            if slot.cause is not None and slot.cause[0] != rank:
                events += _arrow(simulation, slot.cause, rank, slot.start, us_per_unit, len(events))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _arrow(
    simulation: Simulation, source: tuple[int, int], rank: int, at: float, scale: float, number: int
) -> list[dict[str, Any]]:
    sender = simulation.slots[source[0]][source[1]]
    common = {"name": "waits for", "cat": "message", "id": number, "pid": 0}
    return [
        {**common, "ph": "s", "tid": sender.rank, "ts": sender.end * scale - 0.01},
        {**common, "ph": "f", "bp": "e", "tid": rank, "ts": at * scale},
    ]
