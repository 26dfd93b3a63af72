"""Build the tables of docs/benchmarks/unmodified.md from the cases of `benchmarks.unmodified`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.table import Table
from benchmarks.unmodified.cases import CAUSES, ENDS_A_JOB, HEALTHY, Case

SCRIPTS = ("ddp", "fsdp2", "accelerate_loop", "lightning_fit", "trainer", "deepspeed_zero")
_SELECTIONS = {
    "two-ranks": (2, False),
    "four-ranks": (4, False),
    "attached": (2, True),
    "attached-four-ranks": (4, True),
}


def key(case: Case) -> tuple[object, ...]:
    """Return the key that distinguishes a case from the others."""
    names = ("script", "fault", "ranks", "turn", "attach")
    return tuple(case.get(name, 0) for name in names)


def latest(cases: Sequence[Case]) -> list[Case]:
    """Return the last result of each case, in the order in which the cases first ran."""
    return list({key(case): case for case in cases}.values())


def save(cases: Sequence[Case], folder: Path) -> None:
    """Write the tables: faults by script, healthy runs, and all results that were ever wrong."""
    last = latest(cases)
    for name, (ranks, attach) in _SELECTIONS.items():
        some = [
            case for case in last if (case["ranks"], bool(case.get("attach"))) == (ranks, attach)
        ]
        _faults(some, attach).save(folder / f"{name}.json")
    _healthy(last).save(folder / "healthy.json")
    _wrong(cases).save(folder / "wrong.json")


def _faults(cases: Sequence[Case], attach: bool) -> Table:
    """Return one row per fault and one column per script, with the totals in the last row."""
    shown = [fault for fault in CAUSES if not (attach and fault in ENDS_A_JOB)]
    faulty = [case for case in cases if case["fault"] in shown]
    cells = {(case["fault"], case["script"]): _cell(case) for case in faulty}
    rows = [[fault, *(cells.get((fault, one), "-") for one in SCRIPTS)] for fault in shown]
    shares = [_share([case for case in faulty if case["script"] == one]) for one in SCRIPTS]
    rows.append([f"right of those run: {_share(faulty)}", *shares])
    lined = [case for case in faulty if case.get("line") is not None and not case.get("ended")]
    about = {"num_lines": len(lined), "num_lines_named": sum(case["line"] for case in lined)}
    return Table(["fault", *SCRIPTS], ["left"] * (1 + len(SCRIPTS)), rows, about)


def _cell(case: Case) -> str:
    if case.get("ended"):
        return "ended"
    if not case["right"]:
        return f"wrong: {case.get('cause')}"
    return "right, no line" if case.get("line") is False else "right"


def _share(cases: Sequence[Case]) -> str:
    judged = [case for case in cases if not case.get("ended")]
    return f"{sum(case['right'] for case in judged)} of {len(judged)}" if judged else "-"


def _healthy(cases: Sequence[Case]) -> Table:
    quiet = [case for case in cases if case["fault"] in HEALTHY]
    rows = []
    for kind in HEALTHY:
        runs = [
            [one for one in quiet if (one["fault"], one["script"]) == (kind, s)] for s in SCRIPTS
        ]
        rows.append([kind, *(_alarms(some) for some in runs)])
    per_script = [_alarms([one for one in quiet if one["script"] == s]) for s in SCRIPTS]
    rows.append([f"all: {_alarms(quiet)}", *per_script])
    return Table(["work", *SCRIPTS], ["left"] * (1 + len(SCRIPTS)), rows)


def _alarms(runs: Sequence[Case]) -> str:
    num_failed = sum(not one["right"] and not one["alarm"] for one in runs)
    failed = f", {num_failed} failed" if num_failed else ""
    return f"{sum(one['alarm'] for one in runs)} in {len(runs)}{failed}" if runs else "-"


def _wrong(cases: Sequence[Case]) -> Table:
    """Return every result that was wrong, with the latest result of the same case."""
    now = {key(case): case for case in cases}
    rows = []
    for case in cases:
        if case["right"] or case.get("ended"):
            continue
        last = now[key(case)]
        way = "--attach" if case.get("attach") else "echelon run"
        given = f"{case.get('cause', 'no verdict')} {case.get('culprits', '')}".strip()
        after = "not run again" if last is case else _cell(last)
        where = f"{case['script']}, {case['fault']}, {case['ranks']} ranks"
        rows.append([where, way, given, str(case.get("load", "")), after])
    columns = ["case", "way", "verdict given", "load", "later"]
    return Table(columns, ["left", "left", "left", "right", "left"], rows)
