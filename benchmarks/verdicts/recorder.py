"""Write the dump that torch's flight recorder on one rank would have written at a given moment.

Times of the model are converted to wall-clock nanoseconds of the rank's host. The states are those
that torch derives while it dumps. The watchdog polls at its own period, so `pg_status` and the
times of discovery lag behind the states. Parts of a batch never have a state, and without timing no
operation is ever seen as started.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.verdicts.engine import Engine, Group, Launch, Rank
from benchmarks.verdicts.layouts import Layout

EPOCH_NS = 1_795_000_000_000_000_000
WATCHDOG_S = 0.1
FORMATS = ("2.3", "2.4", "2.7", "2.9", "2.10")  # in torch 2.5 to 2.13
_WITH_THREADS = ("2.9", "2.10")
_LIBRARY_FRAMES = (("all_reduce", 2806), ("wrapper", 81))
_LIBRARY = "/usr/lib/python3.11/site-packages/torch/distributed/"
_TORCH_FILE = _LIBRARY + "distributed_c10d.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """Options for the dumps of one case.

    Attributes:
        timing: True if kernel starts are recorded (TORCH_NCCL_ENABLE_TIMING).
        eager: True if communicators are created with the group; otherwise, a rank's `pg_config` and
            `pg_status` contain only the groups that it has used.
        clock_skew_s: host number -> error of its wall clock in seconds.
    """

    version: str
    as_json: bool
    only_active: bool
    timing: bool
    eager: bool
    ring: int
    backend: str
    clock_skew_s: tuple[float, ...]
    ranks_per_host: int

    @property
    def has_frames(self) -> bool:
        """True if stacks are written; torch's JSON format has none."""
        return not self.as_json


class Recorder:
    """The recorder of one rank of a finished run."""

    def __init__(self, engine: Engine, layout: Layout, manner: Manner, rank: int) -> None:
        self._rank: Rank = engine.ranks[rank]
        self._manner = manner
        self._groups = layout.own(rank)
        self._skew_s = manner.clock_skew_s[rank // manner.ranks_per_host]
        self._phase_s = (rank * 0.0137) % WATCHDOG_S

    def write(self, folder: Path, moment_s: float) -> None:
        """Write the dump at a moment to a folder."""
        top = self.dump(moment_s)
        path = folder / f"{self._manner.backend}_trace_rank_{self._rank.rank}"
        if self._manner.as_json:
            path.write_text(json.dumps(_as_json(top)))
        else:
            path.write_bytes(pickle.dumps(top, protocol=2))

    def dump(self, moment_s: float) -> dict[str, object]:
        """Return the dump at a moment as plain data."""
        launches = [one for one in self._rank.launches if one.created <= moment_s]
        numbers = {group: number for number, group in enumerate(self._groups)}
        frames: dict[tuple[str, int], list[dict[str, object]]] = {}
        entries: list[dict[str, object]] = []
        for launch in launches:
            for entry in self._entries(launch, moment_s):
                entry["pg_id"] = numbers[launch.call.group]
                entry["record_id"] = len(entries)
                if self._manner.has_frames:
                    site = (launch.call.function, launch.call.line)
                    entry["frames"] = frames.setdefault(site, _frames(*site))
                entries.append(entry)
        entries = entries[-self._manner.ring :]
        if self._manner.only_active:
            entries = [one for one in entries if one["time_discovered_completed_ns"] is None]
        used = {launch.call.group for launch in launches}
        top: dict[str, object] = {
            "version": self._manner.version,
            "pg_config": self._config(used),
            "pg_status": {
                str(numbers[group]): self._status(group, launches, moment_s)
                for group in self._groups
                if group in used
            },
            self._library_key(): "2.27.5" if self._manner.backend == "nccl" else "",
        }
        if entries or not self._manner.as_json:
            top["entries"] = entries
        return top

    def _library_key(self) -> str:
        return "comm_lib_version" if self._manner.version == "2.10" else "nccl_version"

    def _config(self, used: set[Group]) -> dict[str, object]:
        if self._manner.backend == "gloo":
            return {"": {"name": "", "desc": "", "ranks": "[]"}}
        known = [g for g in self._groups if self._manner.eager or g in used]
        return {
            group.name: {"name": group.name, "desc": group.desc, "ranks": str(list(group.ranks))}
            for group in known
        }

    def _status(self, group: Group, launches: list[Launch], moment_s: float) -> dict[str, int]:
        mine = [one for one in launches if one.call.group == group]
        done = [one for one in mine if self._noticed_s(one.ended) <= moment_s]
        begun = [one for one in mine if self._noticed_s(one.started) <= moment_s]
        if self._manner.backend == "gloo":
            done = [one for one in mine if _by(one.ended, moment_s)]
        with_starts = self._manner.timing and self._manner.backend == "nccl"
        return {
            "last_enqueued_collective": _number(mine[-1]) if mine else -1,
            "last_started_collective": _number(begun[-1]) if begun and with_starts else -1,
            "last_completed_collective": _number(done[-1]) if done else -1,
        }

    def _noticed_s(self, time_s: float | None) -> float:
        """Return the time of the watchdog's first poll at or after `time_s`; None: infinity."""
        if time_s is None:
            return math.inf
        return math.ceil((time_s - self._phase_s) / WATCHDOG_S) * WATCHDOG_S + self._phase_s

    def _entries(self, launch: Launch, moment_s: float) -> Iterator[dict[str, object]]:
        call = launch.call
        place = call.group.ranks.index
        if not call.parts:
            yield self._entry(launch, call.operation, moment_s, launch.op_id)
            return
        for index, part in enumerate(call.parts):
            arrow = "->" if part.way == "send" else "<-"
            name = f"{part.way} {place(launch.rank)}{arrow}{place(part.peer)}"
            entry = self._entry(launch, name, moment_s, launch.op_id - len(call.parts) + 1 + index)
            for way in ("input", "output"):
                entry[f"{way}_sizes"], entry[f"{way}_dtypes"] = [list(part.sizes)], [part.dtype]
            if call.batched:
                entry["state"], entry["retired"] = "scheduled", False
                entry["time_discovered_started_ns"] = entry["time_discovered_completed_ns"] = None
                entry.pop("duration_ms", None)
            yield entry
        if call.batched:
            yield self._entry(launch, "coalesced", moment_s, launch.op_id)

    def _entry(self, launch: Launch, name: str, moment_s: float, op_id: int) -> dict[str, object]:
        call, manner = launch.call, self._manner
        is_gloo = manner.backend == "gloo"
        ended = _by(launch.ended, moment_s)
        started = manner.timing and _by(launch.started, moment_s)
        seen_end = ended and not is_gloo
        entry: dict[str, object] = {
            "process_group": (call.group.name, call.group.desc),
            "collective_seq_id": launch.collective_seq,
            "p2p_seq_id": launch.p2p_seq,
            "op_id": op_id,
            "profiling_name": f"{manner.backend}:{name}",
            "time_created_ns": self._wall_ns(launch.created),
            "input_sizes": [list(size) for size in call.inputs],
            "input_dtypes": [call.dtype] * len(call.inputs),
            "output_sizes": [list(size) for size in call.outputs],
            "output_dtypes": [call.dtype] * len(call.outputs),
            "state": "scheduled" if is_gloo else _state(started, ended),
            "time_discovered_started_ns": (
                self._discovered_ns(launch.started, moment_s) if started and not is_gloo else None
            ),
            "time_discovered_completed_ns": (
                self._discovered_ns(launch.ended, moment_s) if seen_end else None
            ),
            "retired": ended if is_gloo else self._noticed_s(launch.ended) <= moment_s,
            "timeout_ms": 600_000,
            "is_p2p": bool(call.parts),
        }
        if manner.version in _WITH_THREADS:
            entry["thread_name"], entry["thread_id"] = "pt_main_thread", "139781452"
        if manner.timing and seen_end and launch.ended is not None and launch.started is not None:
            entry["duration_ms"] = (launch.ended - launch.started) * 1e3
        return entry

    def _wall_ns(self, time_s: float) -> int:
        return EPOCH_NS + round((time_s + self._skew_s) * 1e9)

    def _discovered_ns(self, time_s: float | None, moment_s: float) -> int:
        return self._wall_ns(min(self._noticed_s(time_s), moment_s))


def moves(dumps: Callable[[int], Rank], moments: dict[int, float], groups: list[Group]) -> bool:
    """Return whether dumps prove progress: one rank completed what another had not yet entered."""
    for group in groups:
        there = [rank for rank in group.ranks if rank in moments]
        entered, completed = [], []
        for rank in there:
            own = [
                one
                for one in dumps(rank).launches
                if one.call.group == group and not one.call.parts and one.created <= moments[rank]
            ]
            entered.append(own[-1].collective_seq if own else 0)
            done = [one for one in own if _by(one.ended, moments[rank]) and not _rooted(one)]
            completed.append(done[-1].collective_seq if done else 0)
        if there and max(completed) > min(entered):
            return True
    return False


def _rooted(launch: Launch) -> bool:
    return launch.call.operation in ("broadcast", "reduce", "gather", "scatter")


def _by(time_s: float | None, moment_s: float) -> bool:
    return time_s is not None and time_s <= moment_s


def _state(started: bool, ended: bool) -> str:
    return "completed" if ended else "started" if started else "scheduled"


def _number(launch: Launch) -> int:
    return launch.p2p_seq if launch.call.parts else launch.collective_seq


def _frames(function: str, line: int) -> list[dict[str, object]]:
    library = [
        {"name": name, "filename": _TORCH_FILE, "line": number} for name, number in _LIBRARY_FRAMES
    ]
    return [
        *library,
        {"name": function, "filename": "/srv/job/train.py", "line": line},
        {"name": "<module>", "filename": "/srv/job/train.py", "line": 300},
    ]


def _as_json(top: dict[str, object]) -> dict[str, object]:
    """Convert a dump to torch's JSON form, with 0 for missing times and counters as strings."""
    out = dict(top)
    entries = top.get("entries")
    if isinstance(entries, list):
        out["entries"] = [
            {key: 0 if value is None else value for key, value in entry.items()}
            for entry in entries
        ]
    status = top["pg_status"]
    if isinstance(status, dict):
        out["pg_status"] = {
            key: {name: str(value) for name, value in counts.items()}
            for key, counts in status.items()
        }
    return out
