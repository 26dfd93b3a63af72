"""Compute the campaign's figures from its records.

*Useful* is the fraction of a job's time that, by its own log, was spent on distinct steps: their
number times the nominal step time, divided by the time from the launchers' start to their end. It
is compared with that of the fault-free jobs under the same launcher. Jobs that a fault must end are
excluded, because their time depends on where that fault is.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.campaign.jobs import WITH_STANDBYS
from benchmarks.campaign.plan import STEP_S

Record = dict[str, Any]
_NUM_FAULTS = 200


def stays(record: Record) -> bool:
    """Return whether one of the faults that occurred is permanent."""
    return any(fault["stays"] for fault in record["faults"])


def is_wrong_stop(record: Record) -> bool:
    """Return whether a launcher ended a job that could have continued."""
    return not record["finished"] and not stays(record) and not is_late(record)


def is_late(record: Record) -> bool:
    """Return whether a job was killed at its limit: 3 times its fault-free time plus 3 minutes."""
    return record["exit_code"] == -signal.SIGKILL


def restarts(record: Record) -> int:
    """Return the number of restarts; under torchrun, only those that reached a first step."""
    decisions = record.get("report", {}).get("decisions", ())
    told = sum(one["action"] != "stop" for one in decisions)
    return max(record["num_attempts"] - 1, told, 0)


def wasted(record: Record) -> int:
    """Return the number of restarts beyond those that the job's faults need or are granted.

    Each restart is attributed to the latest fault before it, so that one fault's unused restarts do
    not offset another's. Attempts that never began and restarts before any fault are wasted.
    """
    if "begins_s" not in record:  # of earlier records only the sum is known
        needed = sum(fault["restarts"] + fault["granted"] for fault in record["faults"])
        return max(restarts(record) - needed, 0)
    again = record["begins_s"][1:]
    faults = sorted(record["faults"], key=lambda fault: float(fault["at_s"]))
    times = [float("-inf"), *(fault["at_s"] for fault in faults), float("inf")]
    allowed = [0, *(fault["restarts"] + fault["granted"] for fault in faults)]
    num_of = [sum(a <= at < b for at in again) for a, b in pairwise(times)]
    beyond = sum(max(num - most, 0) for num, most in zip(num_of, allowed, strict=True))
    return beyond + max(restarts(record) - len(again), 0)


def useful(record: Record) -> float:
    """Return the fraction of a job's time that was spent on distinct steps."""
    return float(record["num_done"] * STEP_S / record["wall_s"])


def bars(records: Sequence[Record]) -> str:
    """Return what echelon must achieve beside torchrun, and whether it does, one bar per line.

    The figures are those of echelon with standbys if there are any, and without them otherwise.
    """
    names = {one["launcher"] for one in records}
    name = WITH_STANDBYS if WITH_STANDBYS in names else "echelon"
    ours = [one for one in records if one["launcher"] == name]
    peers = [one for one in records if one["launcher"] == "torchrun"]
    num_faults = sum(len(one["faults"]) for one in ours)
    num_wasted, num_restarts = sum(map(wasted, ours)), sum(map(restarts, ours))
    found = [("faults", num_faults, ">=", _NUM_FAULTS)]
    found.append(("wrong stops and jobs not finished in time", _num_unfinished(ours), "<=", 0))
    if num_restarts:
        found.append(("wasted restarts, %", 100 * num_wasted / num_restarts, "<=", 3))
    passing, healthy = _passing(ours), _healthy(ours)
    if passing and healthy:
        share = 100 * _total(passing, useful) / _total(healthy, useful)
        found.append(("useful time, % of the fault-free jobs'", share, ">=", 90))
    if passing and _passing(peers):
        ratio = _total(passing, useful) / _total(_passing(peers), useful)
        found.append(("useful time, times torchrun's", ratio, ">=", 1.3))
    return "\n".join(_bar(*one) for one in found)


def _num_unfinished(records: Sequence[Record]) -> int:
    return sum(is_wrong_stop(one) or (is_late(one) and not stays(one)) for one in records)


def _bar(name: str, value: float, relation: str, bar: float) -> str:
    is_met = value >= bar if relation == ">=" else value <= bar
    return f"{name}: {value:.4g} (bar {relation} {bar:g}): {'met' if is_met else 'not met'}"


def table(records: Sequence[Record]) -> str:
    """Return the table, one column per launcher."""
    names = sorted({one["launcher"] for one in records})
    of = {name: [one for one in records if one["launcher"] == name] for name in names}
    rows = [
        ("jobs, of them without a fault", lambda these: f"{len(these)}, {len(_healthy(these))}"),
        ("faults that struck", lambda these: str(sum(len(one["faults"]) for one in these))),
        ("wrong stops", lambda these: str(sum(map(is_wrong_stop, these)))),
        ("not finished in time", lambda these: str(sum(map(is_late, these)))),
        ("restarts", lambda these: str(sum(map(restarts, these)))),
        ("of them wasted", _wasted),
        ("useful time, fault-free jobs", lambda these: _share(_healthy(these))),
        ("useful time, jobs that can finish", lambda these: _share(_passing(these))),
        ("on two nodes", lambda these: _share(_on(2, these))),
        ("on two nodes and a spare one", lambda these: _share(_on(3, these))),
        ("of the fault-free jobs'", _relative),
        ("by `echelon report`", _by_report),
        ("to recover: median, 90 %", lambda these: _recovery(these, None)),
        ("of it, until the ranks have ended", lambda these: _phase(these, 0)),
        ("until the next attempt begins (verdict, pause)", lambda these: _phase(these, 1)),
        ("until its first step", lambda these: _phase(these, 2)),
    ]
    kinds = sorted({fault["kind"] for one in records for fault in one["faults"]})
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [_row(text, [figure(of[name]) for name in names]) for text, figure in rows]
    lines += [_row(f"`{kind}`", [_recovery(of[name], kind) for name in names]) for kind in kinds]
    return "\n".join(lines)


def _row(text: str, figures: Sequence[str]) -> str:
    return f"| {text} | {' | '.join(figures)} |"


def _healthy(records: Sequence[Record]) -> list[Record]:
    return [one for one in records if not one["plan"]["faults"]]


def _passing(records: Sequence[Record]) -> list[Record]:
    return [one for one in records if one["plan"]["faults"] and not stays(one)]


def _on(num_nodes: int, records: Sequence[Record]) -> list[Record]:
    return [one for one in _passing(records) if one["plan"]["num_nodes"] == num_nodes]


def _phase(records: Sequence[Record], place: int) -> str:
    """Return the median duration of one phase of a restart, by echelon's own account."""
    took = [phases[place] for one in records for phases in one.get("phases", ())]
    return f"{statistics.median(took):.1f} s" if took else "-"


def _total(records: Sequence[Record], part: Callable[[Record], float]) -> float:
    """Return the mean of a fraction over all jobs, weighted by their times."""
    wall_s = sum(one["wall_s"] for one in records)
    return sum(part(one) * one["wall_s"] for one in records) / wall_s if wall_s else float("nan")


def _share(records: Sequence[Record]) -> str:
    return f"{100 * _total(records, useful):.1f} %" if records else "-"


def _relative(records: Sequence[Record]) -> str:
    healthy, passing = _healthy(records), _passing(records)
    if not (healthy and passing):
        return "-"
    return f"{100 * _total(passing, useful) / _total(healthy, useful):.1f} %"


def _wasted(records: Sequence[Record]) -> str:
    num, total = sum(map(wasted, records)), sum(map(restarts, records))
    return f"{num} ({100 * num / total:.0f} %)" if total else str(num)


def _by_report(records: Sequence[Record]) -> str:
    told = [one for one in _passing(records) if "account" in one.get("report", {})]
    if not told:
        return "-"
    return f"{100 * _total(told, lambda one: one['report']['account']['goodput']):.1f} %"


def _recovery(records: Sequence[Record], kind: str | None) -> str:
    faults = [
        fault
        for one in records
        for fault in one["faults"]
        if not fault["stays"] and kind in (None, fault["kind"])
    ]
    took = sorted(one["recovered_s"] for one in faults if one["recovered_s"] is not None)
    if not took:
        return f"none of {len(faults)}" if faults else "-"
    lost = f", {len(faults) - len(took)} not" if len(took) < len(faults) else ""
    high = took[min(len(took) - 1, int(0.9 * len(took)))]
    return f"{statistics.median(took):.1f} s, {high:.1f} s ({len(took)}{lost})"
