"""Write an incident in the format of PyTorch's flight recorder (2.10).

Each rank's file is a pickle of plain dicts, lists, tuples, strings and numbers. Facts that torch's
format cannot represent (reduce op, root, splits, tags, spans, steps) are lost.

Collectives and point-to-point operations are numbered from 1 in each group, as in torch. The ranks
in a name of the form `send 0->1` are positions among the group's sorted members. Stamps are
readings of the rank's own wall clock.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Group, Record, Signature, State
from echelon.recorder.read.reader import read

VERSION = "2.10"
DEFAULT_PREFIX = "nccl_trace_rank_"
_PROTOCOL = 2
_RANK_FILE = re.compile(r"rank_(\d{1,7})\Z")
_FRAME = re.compile(r"(.*):(\d+) (.*)\Z", re.DOTALL)
_DEFAULT_GROUP = ("0", "default_pg")  # torch's own name of the world
_DTYPES = {
    "float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double",
    "int8": "Char", "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
    "float8_e4m3fn": "Float8_e4m3fn", "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
_OPERATIONS = {"monitored_barrier": "barrier"}  # torch's reader stops at unknown names
_STATES = {State.CREATED: "scheduled", State.STARTED: "started", State.COMPLETED: "completed"}


def export_torch(
    incident_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    prefix: str = DEFAULT_PREFIX,
) -> list[Path]:
    """Convert the black boxes in an incident's folder to dumps of torch's flight recorder.

    Args:
        incident_dir: a folder that contains `rank_<r>` dumps or rings.
        out_dir: the output folder for the files `<prefix><rank>`; created if necessary.
        prefix: the prefix of the files' names.

    Returns:
        The paths of the files, in rank order.

    Raises:
        DumpFormatError: the folder contains no readable dump or ring.
        OSError: the files cannot be written.

    Example:
        >>> [path.name for path in export_torch(incident, "for_torch")]
        ['nccl_trace_rank_0', 'nccl_trace_rank_1']
    """
    records = _read_all(Path(incident_dir))
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    names = _Names()
    files = []
    for rank, record in sorted(records.items()):
        path = out / f"{prefix}{rank}"
        part = out / f".{rank}.part"
        part.write_bytes(pickle.dumps(_dump(record, names), protocol=_PROTOCOL))
        part.replace(path)
        files.append(path)
    return files


def _read_all(folder: Path) -> dict[int, Record]:
    records: dict[int, Record] = {}
    failure = DumpFormatError(f"{folder}: no rank's dump in it", path=folder)
    try:
        entries = sorted(folder.iterdir())
    except OSError as err:
        raise DumpFormatError(f"{folder}: {err.strerror or err}", path=folder) from err
    for path in entries:
        if not _RANK_FILE.match(path.name) or not path.is_file():
            continue
        try:
            record = read(path)
        except DumpFormatError as err:
            failure = err
        else:
            records[record.identity.rank] = record
    if not records:
        raise failure
    return records


class _Names:
    """A generator of group names that are unique across all ranks."""

    def __init__(self) -> None:
        self._names: dict[Group, tuple[str, str]] = {}

    def of(self, group: Group, world_size: int) -> tuple[str, str]:
        """Return a group's name and description."""
        known = self._names.get(group)
        if known is None:
            taken = set(self._names.values())
            is_world = group.name == "world" and len(group.ranks) == world_size
            known = _DEFAULT_GROUP if is_world else (group.name, group.name)
            number = 1
            while known in taken:
                number += 1
                known = (f"{group.name}.{number}", group.name)
            self._names[group] = known
        return known


@dataclass
class _Counts:
    """The number of a group's operations so far, and the group's last collective in each state."""

    collectives: int = 0
    p2p: int = 0
    operations: int = 0
    last: dict[str, int] = field(
        default_factory=lambda: {
            "last_enqueued_collective": -1,
            "last_started_collective": -1,
            "last_completed_collective": -1,
        }
    )

    def note(self, row: Any) -> None:
        """Update the counters for one operation."""
        self.operations += 1
        if row["sequence"] < 0:
            self.p2p += 1
            return
        number = self.collectives = int(row["sequence"]) + 1
        self.last["last_enqueued_collective"] = number
        if row["started_mono_ns"]:
            self.last["last_started_collective"] = number
        if row["state"] == State.COMPLETED:
            self.last["last_completed_collective"] = number


def _dump(record: Record, names: _Names) -> dict[str, Any]:
    counts = [_Counts() for _ in record.groups]
    labels = [names.of(group, record.identity.world_size) for group in record.groups]
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(list(group.ranks))}
            for group, (name, desc) in zip(record.groups, labels, strict=True)
        },
        "entries": list(_entries(record, labels, counts)),
        "pg_status": {str(number): one.last for number, one in enumerate(counts)},
    }


def _entries(
    record: Record, labels: Sequence[tuple[str, str]], counts: Sequence[_Counts]
) -> Iterator[dict[str, Any]]:
    to_wall = record.identity.wall_ns - record.identity.mono_ns
    for row in record.operations:
        number = int(row["group"])
        group, signature = record.groups[number], record.signatures[row["signature"]]
        operation = record.strings[row["operation"]]
        count = counts[number]
        count.note(row)
        sizes = _sizes(operation, signature, len(group.ranks))
        dtype = _DTYPES.get(signature.dtype, signature.dtype)
        ended = row["state"] in (State.COMPLETED, State.FAILED)
        completed = row["state"] == State.COMPLETED
        yield {
            "record_id": int(row["record"]),
            "pg_id": number,
            "process_group": labels[number],
            "thread_name": "",
            "thread_id": str(int(row["thread"])),
            "collective_seq_id": count.collectives,
            "p2p_seq_id": count.p2p,
            "op_id": count.operations,
            "profiling_name": f"nccl:{_name(operation, row, group, record.identity.rank)}",
            "time_created_ns": int(row["created_mono_ns"]) + to_wall,
            "input_sizes": sizes["input"],
            "input_dtypes": [dtype] * len(sizes["input"]),
            "output_sizes": sizes["output"],
            "output_dtypes": [dtype] * len(sizes["output"]),
            "state": _state(row),
            "time_discovered_started_ns": _wall(row["started_mono_ns"], to_wall),
            "time_discovered_completed_ns": _wall(
                row["completed_mono_ns"] if completed else 0, to_wall
            ),
            "retired": bool(ended),
            "timeout_ms": int(row["timeout_ms"]),
            "is_p2p": bool(row["sequence"] < 0),
            "frames": _frames(record.strings[row["stack"]] or record.strings[row["site"]]),
        }


def _state(row: Any) -> str:
    if row["state"] == State.FAILED:  # never completed: only how far it got
        return "started" if row["started_mono_ns"] else "scheduled"
    return _STATES[State(int(row["state"]))]


def _wall(stamp: Any, to_wall: int) -> int | None:
    return int(stamp) + to_wall if stamp else None


def _name(operation: str, row: Any, group: Group, rank: int) -> str:
    """Return the name that torch uses for an operation."""
    places: Mapping[int, int] = {member: i for i, member in enumerate(sorted(group.ranks))}
    me, peer = places.get(rank, -1), places.get(int(row["peer"]), -1)
    if operation == "send":
        return f"send {me}->{peer}"
    if operation == "recv":
        return f"recv {me}<-{peer}"
    return _OPERATIONS.get(operation, operation)


def _sizes(operation: str, signature: Signature, group_size: int) -> dict[str, list[list[int]]]:
    """Return an operation's input and output sizes under the keys "input" and "output"."""
    if signature.summary is not None:
        shapes = [[signature.summary[1]]]
    else:
        shapes = [list(shape) for shape in signature.shapes]
    if operation == "all_gather":
        output = [[shape[0] * group_size, *shape[1:]] if shape else shape for shape in shapes]
    elif operation == "reduce_scatter":
        output = [[shape[0] // group_size, *shape[1:]] if shape else shape for shape in shapes]
    else:
        output = shapes
    return {"input": shapes, "output": output}


def _frames(stack: str) -> list[dict[str, Any]]:
    matches = (_FRAME.match(line) for line in stack.splitlines())
    return [
        {"name": match[3], "filename": match[1], "line": int(match[2])}
        for match in matches
        if match
    ]
