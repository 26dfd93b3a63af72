"""Export operations and spans as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

Each rank is a process with two tracks, one for operations and one for spans. Pending operations
extend to the end of the trace. Times are in microseconds since the first event, on rank 0's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.report.clean import clean
from echelon.recorder.format.schema import State

_OPERATIONS, _SPANS = 1, 2
_STATES = {int(state): state.name.lower() for state in State}


def write_trace(evidence: Evidence, path: Path) -> None:
    """Write the trace to a file, one event per line.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events(evidence)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def events(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace, rank by rank."""
    begin, end = _bounds(evidence)
    for facts in evidence.ranks.values():
        host = f" on {clean(facts.identity.host, 60)}" if facts.identity.host else ""
        yield _name("process_name", facts.rank, 0, f"rank {facts.rank}{host}")
        yield {"name": "process_sort_index", "ph": "M", "pid": facts.rank,
               "args": {"sort_index": facts.rank}}  # fmt: skip
        yield _name("thread_name", facts.rank, _OPERATIONS, "operations")
        yield from _operations(evidence, facts, begin, end)
        if len(facts.spans) or facts.open_spans:
            yield _name("thread_name", facts.rank, _SPANS, "spans")
            yield from _spans(evidence, facts, begin, end)


def _bounds(evidence: Evidence) -> tuple[int, int]:
    ranks = [facts for facts in evidence.ranks.values() if len(facts.rows)]
    begin = min((int(facts.rows["created_ns"].min()) for facts in ranks), default=0)
    last = max((int(facts.rows["created_ns"].max()) for facts in ranks), default=0)
    ended = max((int(facts.rows["ended_ns"].max()) for facts in ranks), default=0)
    seen = max((facts.seen_ns for facts in evidence.ranks.values()), default=0)
    return begin, max(last, ended, seen)


def _operations(
    evidence: Evidence, facts: RankEvidence, begin: int, end: int
) -> Iterator[dict[str, Any]]:
    for row in facts.rows:
        call = evidence.call(row)
        start, done = int(row["created_ns"]), int(row["ended_ns"])
        inside = row["state"] in (State.CREATED, State.STARTED)
        until = done or (end if inside else start)
        number = int(row["sequence"] if row["sequence"] >= 0 else row["p2p_sequence"])
        yield {
            "name": clean(call.operation, 60) + (" (still inside)" if inside else ""),
            "cat": "p2p" if row["sequence"] < 0 else "collective",
            "ph": "X",
            "pid": facts.rank,
            "tid": _OPERATIONS,
            "ts": (start - begin) / 1000,
            "dur": max(0, until - start) / 1000,
            "args": {
                "group": clean(evidence.groups[int(row["group"])].name, 80),
                "sequence": number,
                "call": clean(str(call), 200),
                "site": clean(short_site(evidence.site(row)), 200),
                "step": int(row["step"]),
                "state": _STATES.get(int(row["state"]), ""),
            },
        }


def _spans(
    evidence: Evidence, facts: RankEvidence, begin: int, end: int
) -> Iterator[dict[str, Any]]:
    texts = evidence.tables.texts
    for row in facts.spans:
        start, done = int(row["started_ns"]), int(row["ended_ns"])
        yield _span(
            facts.rank, texts[int(row["name"])], start - begin, done - start, int(row["step"])
        )
    for span in facts.open_spans:
        length = max(0, end - span.started_ns)
        yield _span(facts.rank, f"{span.name} (open)", span.started_ns - begin, length, span.step)


def _span(rank: int, name: str, start: int, length: int, step: int) -> dict[str, Any]:
    return {
        "name": clean(name, 60),
        "cat": "span",
        "ph": "X",
        "pid": rank,
        "tid": _SPANS,
        "ts": start / 1000,
        "dur": max(0, length) / 1000,
        "args": {"step": step},
    }


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
