"""What agents and the coordinator tell each other: plain records, carried as msgpack maps.

Events go to the coordinator, commands come from it. No stamp of one node's clock is ever compared
with another's: ages travel instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from echelon.errors import LaunchError

VERSION = 2
MAX_MESSAGE_BYTES = 8 << 20
DUMP_PART_BYTES = 1 << 20

# ---- events: agent -> coordinator ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A node wants to take part."""

    node: str  # unique for this agent
    host: str
    num_workers: int
    node_rank: int = -1  # -1: any
    version: int = VERSION
    address: str = ""  # numeric, as the link saw it; what a node says of itself does not count


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker has ended; `code` as in `subprocess`."""

    attempt: int
    rank: int
    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sights:
    """What a node sees of each living rank: [rank, initialised, progress age in ms (-1: none),
    pending age in ms (-1: none), number of ended operations, spans and steps (or of signs of
    activity), whether it has a ring, number of dumps that torch wrote of itself].
    """

    attempt: int
    ranks: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpPart:
    """A piece of a rank's dump, in order."""

    incident: int
    rank: int
    data: bytes
    is_torchs: bool = False  # of torch's own recorder's dump


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvested:
    """All dumps of a node have been sent."""

    incident: int
    exit_codes: list[list[int]]  # [rank, code] of the ended ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """All workers of an attempt have ended here and nothing of them is left."""

    attempt: int
    exit_codes: list[list[int]]  # [rank, code]
    stopped: list[int]  # ranks that the agent had to stop


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAsked:
    """The user sent this node's launcher a signal that ends the job."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A node is gone. Made by the link, never sent."""

    reason: str


Event = Hello | WorkerEnded | Sights | DumpPart | Harvested | Idle | StopAsked | Left

# ---- commands: coordinator -> agent ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start this node's workers."""

    attempt: int  # folders' number on the coordinator's node
    restart: int
    max_restarts: int
    job_id: str
    world_size: int
    first_rank: int
    num_workers: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """Signal the workers that still run."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect:
    """Snapshot this node's ranks and send their dumps."""

    incident: int
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearUp:
    """End what workers left behind, pass on the rest of their output, and answer `Idle`."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Print something on this node, such as a verdict."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """The job is over; this node's launcher exits with this code."""

    exit_code: int
    ended_by: str
    text: str = ""


Command = Start | Signal | Collect | ClearUp | Show | Over

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Hello, WorkerEnded, Sights, DumpPart, Harvested, Idle, StopAsked,
        Start, Signal, Collect, ClearUp, Show, Over,
    )
}  # fmt: skip


def pack(message: Event | Command) -> bytes:
    """Return a message as bytes."""
    data: bytes = msgpack.packb([type(message).__name__, asdict(message)], use_bin_type=True)
    return data


def unpack(data: bytes) -> Event | Command:
    """Return the message that `pack` wrote.

    Raises:
        LaunchError: it is something else.
    """
    try:
        name, values = msgpack.unpackb(data, raw=False)
        kind = _KINDS[name]
        for field in fields(kind):
            _check(field.type, values.get(field.name, field.default))
        message: Event | Command = kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as err:
        raise LaunchError(f"a message that is none of ours: {err}") from err
    return message


def _check(annotation: object, value: object) -> None:
    plain = {"int": int, "str": str, "bytes": bytes, "bool": bool}
    name = str(annotation)
    if name in plain:
        right = isinstance(value, plain[name]) and isinstance(value, bool) == (name == "bool")
    elif name == "list[int]":
        right = isinstance(value, list) and all(isinstance(v, int) for v in value)
    else:
        assert name == "list[list[int]]", name
        right = isinstance(value, list) and all(
            isinstance(row, list) and all(isinstance(v, int) for v in row) for row in value
        )
    if not right:
        raise TypeError(f"{value!r} is no {name}")
