"""Measure how `fr-analyze` scales on other workloads, compared with torch's analyzer.

    python -m benchmarks.analysis.shapes                      # all shapes, each once
    python -m benchmarks.analysis.shapes --only receives --torch-timeout 120

- `receives`: 512 ranks in a ring, each with its receives posted a step ahead. One hangs, and the
  others then block one by one. In echelon's and in torch's dump format; torch's analyzer reads the
  latter too.
- `stacks`: 4,096 ranks that record nothing. The kernel shows which ranks wait, and every rank has
  the stacks of ten threads. Rank 2730 sleeps.
- `pipelines`: 16,384 ranks in 2,048 pipelines of 8 stages. One stage hangs; the other stages of its
  pipeline wait in messages, and all other pipelines in a collective. In both formats.

Each folder is analyzed in a fresh process; the verdict must name the hanging rank.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.analysis.scale import START_NS, Figure, Plan, measure, measure_torch_analyzer
from echelon.recorder.format.schema import (
    OPERATION,
    SPAN,
    Flag,
    Group,
    HostFacts,
    HostThread,
    Identity,
    Live,
    Record,
    Signature,
    State,
)
from echelon.recorder.read.dump import write_dump

STEPS = 50
RING_STEPS = 20
STAGES = 8
SITES = ["/srv/job/train.py:20 step", "/srv/job/train.py:31 receive", "/srv/job/train.py:44 send"]
STRINGS = ["", "all_reduce", "send", "recv", "sum", *SITES]
ALL_REDUCE, SEND, RECV, SUM = 1, 2, 3, 4
SITE = {ALL_REDUCE: 5, RECV: 6, SEND: 7}
HANGING = (
    'Thread 0x1 (most recent call first):\n  File "/srv/job/data.py", line 88 in read\n'
    '  File "/srv/job/train.py", line 151 in <module>\n'
)


@dataclass(frozen=True)
class Call:
    """One operation of a rank: its kind, its peer, and whether it is pending."""

    operation: int
    peer: int = -1
    group: int = 0
    pending: bool = False


def record(rank: int, size: int, groups: list[Group], calls: list[Call], *, hangs: bool) -> Record:
    """Return one rank's record of the given calls, 1 ms apart."""
    rows = np.zeros(len(calls), OPERATION)
    counts: dict[tuple[int, ...], int] = {}  # of a group's collectives, or of a way to a peer
    for index, call in enumerate(calls):
        row = rows[index]
        is_message = call.operation != ALL_REDUCE
        row["record"], row["operation"], row["group"] = index, call.operation, call.group
        way = (call.group, call.operation, call.peer)
        number = counts[way] = counts.get(way, -1) + 1
        row["sequence"] = -1 if is_message else number
        row["p2p_sequence"] = number if is_message else -1
        row["flags"] = Flag.P2P if is_message else 0
        row["peer"], row["tag"], row["root"], row["coalesced"] = call.peer, -1, -1, -1
        row["created_mono_ns"] = START_NS + index * 1_000_000 + rank
        row["started_mono_ns"] = row["created_mono_ns"] + 1000
        row["completed_mono_ns"] = 0 if call.pending else row["created_mono_ns"] + 400_000
        row["state"] = State.STARTED if call.pending else State.COMPLETED
        row["site"], row["num_bytes"] = SITE[call.operation], 4096
        row["reduce_op"] = 0 if is_message else SUM
    now = START_NS + STEPS * 10 * 1_000_000 + 60 * 10**9
    live = [0] * Live.NUM_WORDS
    live[Live.HEARTBEAT_MONO_NS] = now
    return Record(
        path="",
        identity=Identity(
            rank=rank, world_size=size, boot_id=str(rank // 8), clock_error_ns=20_000
        ),
        operations=rows,
        spans=np.zeros(0, SPAN),
        open_spans=np.zeros(0, SPAN),
        strings=STRINGS,
        groups=groups,
        signatures=[Signature("bfloat16", ((1024, 1024),))],
        live=tuple(live),
        host=HostFacts(
            alive=True, process_state="S", stacks=HANGING if hangs else "", snapshot_mono_ns=now
        ),
        dumped_mono_ns=now,
    )


# ---- the shapes ----


def ring_calls(rank: int, size: int, culprit: int) -> list[Call]:
    """Return a ring rank's exchanges with both neighbors, with receives posted one step ahead.

    The culprit hangs after `RING_STEPS` steps; a rank at distance d runs d - 1 steps more.
    """

    def num_sent(one: int) -> int:
        apart = abs(one - culprit)
        return RING_STEPS + min(apart, size - apart)

    def receive(step: int) -> list[Call]:
        return [Call(RECV, peer, pending=step >= num_sent(peer)) for peer in peers]

    peers = ((rank - 1) % size, (rank + 1) % size)
    calls = receive(0)
    for step in range(num_sent(rank)):
        calls += [*receive(step + 1), *(Call(SEND, peer) for peer in peers)]
    return calls


def write_receives(plan: Plan, folder: Path) -> None:
    """Write the dumps of the ring in echelon's format."""
    for rank in range(plan.ranks):
        group = [Group("world", tuple(range(plan.ranks)))]
        calls = ring_calls(rank, plan.ranks, plan.culprit)
        hangs = rank == plan.culprit
        write_dump(record(rank, plan.ranks, group, calls, hangs=hangs), folder / f"rank_{rank}")
    _incident(plan, folder)


def write_torch_receives(plan: Plan, folder: Path) -> None:
    """Write the dumps of the ring in the format of torch's NCCL recorder."""
    ranks = str(list(range(plan.ranks)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    for rank in range(plan.ranks):
        calls = ring_calls(rank, plan.ranks, plan.culprit)
        entries = [_torch_entry(rank, index, call) for index, call in enumerate(calls)]
        top = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(top, protocol=2))


_FRAMES = {  # shared, as torch writes them
    operation: [{"name": "step", "filename": "/srv/job/train.py", "line": 20 + operation}]
    for operation in (ALL_REDUCE, SEND, RECV)
}


def _torch_entry(rank: int, index: int, call: Call) -> dict[str, object]:
    arrow = "->" if call.operation == SEND else "<-"
    now = 1_795_000_000_000_000_000 + index * 1_000_000
    sizes = [[1024, 1024]]
    return {
        "frames": _FRAMES[call.operation],
        "record_id": index,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0,
        "p2p_seq_id": index + 1,
        "op_id": index + 1,
        "profiling_name": f"nccl:{STRINGS[call.operation]} {rank}{arrow}{call.peer}",
        "time_created_ns": now,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
        "state": "started" if call.pending else "completed",
        "time_discovered_started_ns": now + 1000,
        "time_discovered_completed_ns": None if call.pending else now + 400_000,
        "retired": not call.pending,
        "timeout_ms": 600_000,
        "is_p2p": True,
    }


def write_stacks(plan: Plan, folder: Path) -> None:
    """Write dumps of ranks without a ring, each with the stacks of ten threads."""
    library = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    for rank in range(plan.ranks):
        hangs = rank == plan.culprit
        others = "".join(
            f"Thread {rank * 16 + n:#x} (most recent call first):\n"
            + "".join(
                f'  File "/usr/lib/python3.11/threading.py", line {line} in wait\n'
                for line in range(300, 330)
            )
            + "\n"
            for n in range(2, 11)
        )
        inner = (
            '  File "/srv/job/data.py", line 88 in read\n'
            if hangs
            else f'  File "{library}", line {3000 + rank % 7} in all_reduce\n'
        )
        main = (
            f"Thread {rank * 16 + 1:#x} (most recent call first):\n{inner}"
            '  File "/srv/job/train.py", line 140 in main\n'
            '  File "/srv/job/train.py", line 151 in <module>\n'
        )
        made = record(rank, plan.ranks, [], [], hangs=hangs)
        host = replace(
            made.host,
            stacks=others + main,
            threads=(HostThread(name="python", call="nanosleep" if hangs else "futex"),),
        )
        made = replace(made, host=host, has_ring=False, live=(0,) * Live.NUM_WORDS)
        write_dump(made, folder / f"rank_{rank}")
    _incident(plan, folder)


def stage_calls(rank: int, culprit: int) -> list[Call]:
    """Return a stage's calls in each step; the neighbors of a hanging stage wait in messages."""
    begin, first = rank - rank % STAGES, culprit - culprit % STAGES
    step = [
        *([Call(RECV, rank - 1, 1)] if rank > begin else []),
        *([Call(SEND, rank + 1, 1)] if rank < begin + STAGES - 1 else []),
        Call(ALL_REDUCE),
    ]
    calls = step * STEPS
    if begin != first or rank < culprit:
        return [*calls, *step[:-1], Call(ALL_REDUCE, pending=True)]
    return [*calls, Call(RECV, rank - 1, 1, pending=True)] if rank > culprit else calls


def write_pipelines(plan: Plan, folder: Path) -> None:
    """Write the dumps of the pipelines in echelon's format."""
    world = Group("world", tuple(range(plan.ranks)))
    for rank in range(plan.ranks):
        begin = rank - rank % STAGES
        groups = [world, Group(f"pp{rank // STAGES}", tuple(range(begin, begin + STAGES)))]
        made = record(
            rank, plan.ranks, groups, stage_calls(rank, plan.culprit), hangs=rank == plan.culprit
        )
        write_dump(made, folder / f"rank_{rank}")
    _incident(plan, folder)


def write_torch_pipelines(plan: Plan, folder: Path) -> None:
    """Write the dumps of the pipelines in the format of torch's NCCL recorder."""
    world = {"name": "0", "desc": "default_pg", "ranks": str(list(range(plan.ranks)))}
    for rank in range(plan.ranks):
        begin = rank - rank % STAGES
        stages = {"name": "1", "desc": "pp", "ranks": str(list(range(begin, begin + STAGES)))}
        counts = [0, 0]
        entries = []
        for index, call in enumerate(stage_calls(rank, plan.culprit)):
            is_message = call.operation != ALL_REDUCE
            counts[is_message] += 1
            local = replace(call, peer=call.peer - begin)
            entries.append(
                {
                    **_torch_entry(rank - begin, index, local),
                    "pg_id": int(is_message),
                    "process_group": ("1", "pp") if is_message else ("0", "default_pg"),
                    "collective_seq_id": 0 if is_message else counts[0],
                    "p2p_seq_id": counts[1] if is_message else 0,
                    "op_id": counts[is_message],
                    "is_p2p": is_message,
                }
            )
            if not is_message:
                entries[-1]["profiling_name"] = "nccl:all_reduce"
        top = {
            "version": "2.10",
            "pg_config": {"0": world, "1": stages},
            "pg_status": {},
            "entries": entries,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(top, protocol=2))


def _incident(plan: Plan, folder: Path) -> None:
    incident = {"format": 1, "kind": "stall", "number": 0, "attempt": 0, "world_size": plan.ranks}
    (folder / "incident.json").write_text(json.dumps(incident))


@dataclass(frozen=True)
class Shape:
    """A row of the table."""

    name: str
    ranks: int
    write: Callable[[Plan, Path], None]
    is_torchs: bool = False


SHAPES = (
    Shape("receives", 512, write_receives),
    Shape("receives", 512, write_torch_receives, is_torchs=True),
    Shape("stacks", 4096, write_stacks),
    Shape("pipelines", 16384, write_pipelines),
    Shape("pipelines", 16384, write_torch_pipelines, is_torchs=True),
)


def main() -> int:
    """Write and analyze each folder, and print a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="SHAPE,...")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=0, help="instead of each shape's own number")
    parser.add_argument("--torch-timeout", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args()
    print("| shape | ranks | dumps | fr-analyze | CPU | peak | torch's analyzer | CPU | peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        if not options.only or shape.name in options.only.split(","):
            ranks = options.ranks or shape.ranks
            print(line(shape, Plan(ranks, 0, ranks * 2 // 3), options))
            sys.stdout.flush()
    return 0


def line(shape: Shape, plan: Plan, options: argparse.Namespace) -> str:
    """Measure one shape; return its line of the table."""
    with tempfile.TemporaryDirectory(prefix="shapes-") as below:
        folder = Path(below) / "incident_0"
        folder.mkdir()
        shape.write(plan, folder)
        ours = measure(folder, plan, options.repeat)
        theirs: Figure | None = None
        if shape.is_torchs:
            theirs = measure_torch_analyzer(folder, options.torch_timeout)
    columns = theirs.columns() if theirs else ["-", "-", "-"]
    whose = "torch's" if shape.is_torchs else "echelon's"
    cells = [shape.name, f"{plan.ranks:,}", whose, *ours.columns(), *columns]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
