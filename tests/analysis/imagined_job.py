"""Make records of imagined ranks, so that a test reads as the story of a job.

`Job(4)` is a world of four; `job[2].all_reduce(shape=(8,))` lets rank 2 make a call. A call is
completed unless told otherwise; `inside=True` leaves the rank in it. Time moves on by a millisecond
a call on each rank. `job.evidence()` is what the rules see, `job.write(folder)` what loaders read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from echelon.analysis.diagnose import diagnose
from echelon.analysis.evidence.model import Evidence, Incident
from echelon.analysis.finding import Report
from echelon.analysis.sources.builder import EvidenceBuilder
from echelon.recorder.format.schema import (
    OPERATION,
    SPAN,
    Flag,
    Group,
    HostFacts,
    Identity,
    LastWords,
    Live,
    Record,
    Signature,
    State,
)
from echelon.recorder.read.dump import write_dump

START_NS = 1_000_000_000_000
STEP_NS = 1_000_000
SNAPSHOT_S = 30.0  # how long after its last call a job is looked at
MAIN_THREAD = 77

STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/user/job/{file}", line {line} in {function}
  File "/home/user/job/train.py", line 140 in main
  File "/home/user/job/train.py", line 151 in <module>
"""


class Rank:
    """One imagined rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.now_ns = START_NS + rank * 1000
        self.step_number = -1
        self.operations: list[dict[str, object]] = []
        self.span_rows: list[dict[str, object]] = []
        self.strings = [""]
        self.groups: list[Group] = []
        self.signatures: list[Signature] = []
        self.counts: dict[object, int] = {}
        self.host: dict[str, object] = {"alive": True, "process_state": "S", "cpu_share": 0.0}
        self.words: LastWords | None = None
        self.closed = False
        self.heartbeat_age_s = 0.1
        self.native_heartbeat_age_s = -1.0  # of the thread that needs no lock; -1: there is none
        self.has_ring = True
        self.identity: dict[str, object] = {"boot_id": "one-host"}

    def text(self, text: str) -> int:
        if text not in self.strings:
            self.strings.append(text)
        return self.strings.index(text)

    def wait(self, seconds: float) -> Rank:
        self.now_ns += int(seconds * 1e9)
        return self

    def step(self, number: int | None = None) -> Rank:
        self.step_number = self.step_number + 1 if number is None else number
        return self

    def all_reduce(self, **how: object) -> Rank:
        return self.call("all_reduce", **{"reduce_op": "sum", **how})

    def barrier(self, **how: object) -> Rank:
        return self.call("barrier", **{"shape": None, "dtype": "", **how})

    def call(
        self,
        operation: str,
        *,
        group: str = "world",
        ranks: tuple[int, ...] = (),
        shape: tuple[int, ...] | None = (4, 4),
        dtype: str = "float32",
        reduce_op: str = "",
        root: int = -1,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        site: str = "train.py:10 step",
        inside: bool = False,
        created: bool = False,
        failed: str = "",
        peer: int = -1,
        tag: int = -1,
        took_s: float = 0.0005,
    ) -> Rank:
        members = Group(group, ranks or tuple(range(self.world_size)))
        if members not in self.groups:
            self.groups.append(members)
        shapes = () if shape is None else (shape,)
        signature = Signature(dtype, shapes, *splits)
        if signature not in self.signatures:
            self.signatures.append(signature)
        counter = (members, peer, operation) if peer >= 0 else members
        number = self.counts[counter] = self.counts.get(counter, -1) + 1
        open_state = State.CREATED if created else State.STARTED
        state = State.FAILED if failed else open_state if inside else State.COMPLETED
        ended = 0 if inside else self.now_ns + int(took_s * 1e9)
        self.operations.append(
            {
                "record": len(self.operations),
                "sequence": -1 if peer >= 0 else number,
                "p2p_sequence": number if peer >= 0 else -1,
                "created_mono_ns": self.now_ns,
                "started_mono_ns": 0 if created else self.now_ns + 1000,
                "completed_mono_ns": ended,
                "step": self.step_number,
                "group": self.groups.index(members),
                "operation": self.text(operation),
                "signature": self.signatures.index(signature),
                "reduce_op": self.text(reduce_op),
                "site": self.text(f"/home/user/job/{site}"),
                "error": self.text(failed),
                "root": root,
                "peer": peer,
                "tag": tag,
                "coalesced": -1,
                "thread": MAIN_THREAD,
                "flags": int(Flag.P2P) if peer >= 0 else 0,
                "state": int(state),
                "num_bytes": int(np.prod(shape or (0,))) * 4,
            }
        )
        self.now_ns = max(self.now_ns + STEP_NS, ended)
        return self

    def send(self, to: int, **how: object) -> Rank:
        return self.call("send", peer=to, **how)

    def recv(self, source: int, **how: object) -> Rank:
        return self.call("recv", peer=source, **how)

    def span(
        self, name: str, *, open_: bool = True, detail: str = "", thread: int = MAIN_THREAD,
        depth: int = 0, took_s: float = 0.001, site: str = "train.py:88 next_batch",
    ) -> Rank:  # fmt: skip
        self.span_rows.append(
            {
                "number": len(self.span_rows),
                "started_mono_ns": self.now_ns,
                "ended_mono_ns": 0 if open_ else self.now_ns + int(took_s * 1e9),
                "step": self.step_number,
                "name": self.text(name),
                "detail": self.text(detail),
                "site": self.text(f"/home/user/job/{site}"),
                "thread": thread,
                "depth": depth,
            }
        )
        self.now_ns += 0 if open_ else int(took_s * 1e9)
        return self

    def stands(self, file: str = "tokenize.py", line: int = 88, function: str = "fetch") -> Rank:
        self.host["stacks"] = STACK.format(file=file, line=line, function=function)
        return self

    def looked_at_again(
        self, *, recorded: int = 0, at: tuple[str, int, str] | None = None, beat: bool = True
    ) -> Rank:
        """Be looked at a second time, 2 s later: what was recorded since, and where it stands."""
        stacks = self.host.get("stacks", "")
        if at is not None:
            stacks = STACK.format(file=at[0], line=at[1], function=at[2])
        self.host.update(
            later_gap_s=2.0, later_recorded=recorded, later_stacks=stacks,
            later_heartbeat_mono_ns=1 << 62 if beat else 0,
        )  # fmt: skip
        return self

    def on_host(self, name: str, *, ahead_s: float = 0.0, error_ns: int = -1) -> Rank:
        """Run on another machine; `error_ns` -1: its clock was never compared with the others'."""
        self.identity.update(boot_id=f"boot of {name}", host=name, clock_error_ns=error_ns)
        self.now_ns += int(ahead_s * 1e9)
        return self

    def exited(self, code: int, *, order: int = 0, by_agent: bool = False, **facts: object) -> Rank:
        self.host.update(
            alive=False, exit_code=code, exit_order=order, stopped_by_agent=by_agent,
            process_state="", exited_mono_ns=self.now_ns + order, **facts,
        )  # fmt: skip
        return self

    def raised(
        self, type_: str, message: str, *, site: str = "train.py:42 forward",
        bases: tuple[str, ...] = ("builtins.Exception",), order: int = 0, code: int = 1,
    ) -> Rank:  # fmt: skip
        place = f"/home/user/job/{site}"
        trace = f"Traceback (most recent call last):\n  somewhere\n{type_}: {message}\n"
        self.words = LastWords(
            type=type_,
            message=message,
            site=place,
            traceback=trace,
            mono_ns=self.now_ns + order * STEP_NS,
            bases=bases,
        )
        return self.exited(code, order=order)

    def record(self, end_ns: int) -> Record:
        live = [0] * Live.NUM_WORDS
        if self.has_ring:
            live[Live.HEARTBEAT_MONO_NS] = end_ns - int(self.heartbeat_age_s * 1e9)
            live[Live.PROGRESS_MONO_NS] = self.now_ns
            if self.native_heartbeat_age_s >= 0:
                age_ns = int(self.native_heartbeat_age_s * 1e9)
                live[Live.NATIVE_HEARTBEAT_MONO_NS] = end_ns - age_ns
        live[Live.STEP] = self.step_number + 1
        live[Live.NUM_OPERATIONS] = len(self.operations)
        live[Live.CLOSED] = int(self.closed)
        spans = _table(SPAN, self.span_rows)
        return Record(
            path=f"rank_{self.rank}",
            identity=Identity(rank=self.rank, world_size=self.world_size, **self.identity),
            operations=_table(OPERATION, self.operations),
            spans=spans[spans["ended_mono_ns"] > 0],
            open_spans=spans[spans["ended_mono_ns"] == 0],
            strings=self.strings,
            groups=self.groups,
            signatures=self.signatures,
            live=tuple(live),
            last_words=self.words,
            host=HostFacts(**{"snapshot_mono_ns": end_ns, **self.host}),
            dumped_mono_ns=end_ns,
            has_ring=self.has_ring,
        )


class Job:
    """An imagined job."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [Rank(rank, world_size) for rank in range(world_size)]
        self.left_out: set[int] = set()
        self.snapshot_s = SNAPSHOT_S
        self.ended: list[int] = []  # the order in which the coordinator heard of ends

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    def others(self, *but: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.rank not in but]

    def train(self, steps: int, *, buckets: int = 2, but: tuple[int, ...] = ()) -> Job:
        """Let all ranks make `steps` steps of `buckets` collectives of rising size, and a loss."""
        for _ in range(steps):
            for rank in self.others(*but):
                rank.step()
                for bucket in range(buckets):
                    rank.all_reduce(shape=(64 * (bucket + 1),), site="train.py:20 backward")
                rank.all_reduce(shape=(1,), site="train.py:25 log_loss")
        return self

    def lose(self, *ranks: int) -> Job:
        self.left_out.update(ranks)
        return self

    def records(self) -> list[Record]:
        end_ns = max(rank.now_ns for rank in self.ranks) + int(self.snapshot_s * 1e9)
        return [rank.record(end_ns) for rank in self.ranks if rank.rank not in self.left_out]

    def evidence(self, kind: str = "stall") -> Evidence:
        builder = EvidenceBuilder()
        for record in self.records():
            builder.add(record)
        incident = Incident()
        if kind:
            incident = Incident(kind=kind, world_size=len(self.ranks), ended=tuple(self.ended))
        return builder.build(incident=incident)

    def report(self, kind: str = "stall") -> Report:
        return diagnose(self.evidence(kind))

    def write(
        self,
        folder: Path,
        kind: str = "stall",
        absent: dict[str, object] | None = None,
        lost: object = (),
        lost_earlier: object = (),
        set_aside: object = (),
    ) -> Path:
        folder.mkdir(parents=True)
        for record in self.records():
            write_dump(record, folder / f"rank_{record.identity.rank}")
        incident = {
            "format": 1,
            "kind": kind,
            "number": 0,
            "attempt": 0,
            "world_size": len(self),
            "reason": "",
            "ranks_absent": absent or {},
            "ranks_lost": lost,
            "lost_earlier": lost_earlier,
            "set_aside": set_aside,
        }
        (folder / "incident.json").write_text(json.dumps(incident))
        return folder


def _table(dtype: np.dtype, rows: list[dict[str, object]]) -> np.ndarray:
    out = np.zeros(len(rows), dtype)
    for index, row in enumerate(rows):
        for name, value in row.items():
            out[index][name] = value
    return out
