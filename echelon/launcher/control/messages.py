"""What agents and the coordinator tell each other: plain records, carried as msgpack maps.

Events go to the coordinator, commands come from it. No stamp of one node's clock is ever compared
with another's: ages travel instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from echelon.errors import LaunchError

VERSION = 7
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
    port: int = 0  # at which it would host the job in turn, 0: it would not
    holds: int = -1  # the world whose ranks it has, after the loss of a host
    life_port: int = 0  # refuses connections once this launcher is gone; 0: none


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """The answer to `LeaseBeat` or `Entrust`; `version`: of the mandate that this node holds."""

    term: int
    number: int
    stamp: int
    version: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """A node without a host asks for a vote, and who hosts the job; answered by `Vote`."""

    node: str
    term: int
    version: list[int]
    is_binding: bool
    founder: str = ""  # of the job, for a witness


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    """A host's beat to the witness; answered by `LeaseReply`. `number` 0: the mandate alone."""

    founder: str
    term: int
    host: str
    number: int
    holds: bool  # the lease lasts without the witness's reply
    promise_ms: int
    mandate: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """A node that was admitted is connected again; `received`: the number of the last message."""

    node: str
    token: str
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker has ended; `code` as in `subprocess`."""

    attempt: int
    rank: int
    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sights:
    """What a node sees of its living ranks.

    `folded` stands for all ranks that record: [first rank, initialised, progress age in ms (-1:
    none), oldest pending age in ms (-1: none), its rank, number of signs of progress so far, number
    of dumps that torch wrote of itself]; [] if no rank records.
    `ranks` has each other rank: [rank, initialised, progress age, pending age, number of signs of
    activity, whether it has a ring, number of dumps].
    `dumped_rank` is the rank among the folded ones that wrote the last of those dumps; -1: none.
    The rest is what the folded ranks' own histories say, see `limits.node.Summary`.
    """

    attempt: int
    folded: list[int]
    ranks: list[list[int]]
    dumped_rank: int = -1
    worked_ms: int = -1
    is_excused: bool = True
    patience_ms: int = -1
    late_rank: int = -1
    late_ms: int = -1
    limit_ms: int = -1
    what: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laps:
    """How a node's ranks advance, and what their time went into.

    `laps` has steps that ended since the last report: [rank, first step, step after the last one,
    age of the begin, age of the end, waited, spent on checkpoints, spent on data], all ages and
    durations in us.
    `ranks` has each rank: [rank, step (-1: none), age of its last sign of progress in ms (-1:
    none), step of the last checkpoint saved (-1: none), number of checkpoints loaded, then what
    the unfinished step has spent as above, in us].
    """

    attempt: int
    laps: list[list[int]]
    ranks: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unkillable:
    """A worker that lives on after SIGKILL; `why`: the wait channel, or what the kernel refused."""

    attempt: int
    rank: int
    why: str


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A visitor, which is not a node, asks for the job's state; sent again for each answer."""

    version: int = VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Statuses:
    """What a node's ranks do. From the node to the coordinator, which passes it on."""

    visitor: str
    host: str
    numbers: list[
        list[int]
    ]  # a rank's number, sequence, lag in ms, step, step time in us; -1: none
    words: list[list[str]]  # the same rank's phase and operation


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckIn:
    """A node takes part in a check before the job; `port` is one that it listens at."""

    host: str
    port: int
    versions: list[list[str]]  # [name, version]
    address: str = ""  # numeric, as the link saw it
    token: str = ""  # that its listener asks for
    folder: str = ""  # where its part of the job would keep files


@dataclass(frozen=True, kw_only=True, slots=True)
class Tock:
    """The answer to `Tick`: this node's wall clock."""

    number: int
    wall_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WaysTried:
    """Which nodes were reached from here: [host, what went wrong or ""]."""

    found: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """What the probes of one `Probe` found, in order: each the text of a `probes.Finding`."""

    number: int
    findings: list[str]


Event = (
    Hello | WorkerEnded | Sights | DumpPart | Harvested | Idle | StopAsked | Left | Ask | Statuses
    | Unkillable | Resume | CheckIn | Tock | WaysTried | LeaseReply | Poll | Renew | Laps
    | Probed
)  # fmt: skip

# ---- commands: coordinator -> agent ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The answer to a greeting, before any other message; the host's settings hold on all nodes."""

    token: str  # proves, at the next connection, whose session it is
    received: int
    lost_after_ms: int
    beat_ms: int = 500  # how often both sides report at least


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseBeat:
    """The host holds its lease; with the reply `echo` this bounds how long ranks may run."""

    term: int
    host: str
    number: int
    echo: int
    remaining_ms: int
    promise_ms: int  # how long it binds an elector; the host's setting holds on all nodes
    holds: bool = False  # to the witness: the lease lasts without its reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrust:
    """Keep this mandate, in the form of `pack_mandate`."""

    mandate: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """An elector's answer to `Poll`."""

    term: int
    granted: bool
    early: bool
    host: str
    endpoint: str


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
    stall_timeout_ms: int  # the host's settings hold on all nodes
    torch_backend: str
    resume: str = ""  # the job's newest committed checkpoint
    history: str = ""  # JSON: how the attempts before this one ended
    sights_ms: int = 0  # how often to report ranks that show nothing unusual; 0: at each look
    learns_limits: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Signal the workers that still run, and kill after the grace those that then still do.

    Only the first one of an attempt counts. `urgent`: do not finish collecting an incident first.
    """

    number: int
    grace_ms: int
    urgent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Send SIGKILL to the workers that still run."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TellStatus:
    """Answer `Statuses`, for this visitor."""

    visitor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShown:
    """To a visitor: how the job stands; as many `Statuses` follow as it has nodes."""

    job_id: str
    phase: str
    restarts: int
    world_size: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Answer `Tock` at once."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TryWays:
    """Connect to each of these: [host, address, port]."""

    places: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Run these probes at the same time, each the text of a `probes.Task`; answer `Probed`."""

    number: int
    tasks: list[str]


Command = (
    Start | Stop | Kill | Collect | ClearUp | Show | Over | TellStatus | JobShown | Statuses
    | Tick | TryWays | Welcome | LeaseBeat | Entrust | Vote | Probe
)  # fmt: skip

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Hello, WorkerEnded, Sights, DumpPart, Harvested, Idle, StopAsked, Ask, Statuses,
        CheckIn, Tock, WaysTried, Unkillable, Resume, Welcome, Laps,
        Start, Stop, Kill, Collect, ClearUp, Show, Over, TellStatus, JobShown, Tick, TryWays,
        LeaseBeat, LeaseReply, Entrust, Poll, Renew, Vote, Probe, Probed,
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
        # A newer version may have more fields: its greeting must be readable to be refused.
        known = {f.name: values[f.name] for f in fields(kind) if f.name in values}
        for field in fields(kind):
            _check(field.type, known.get(field.name, field.default))
        message: Event | Command = kind(**known)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as err:
        raise LaunchError(f"malformed message: {err}") from err
    return message


_PLAIN: dict[str, type[Any]] = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def _check(annotation: object, value: object) -> None:
    """Check a value against a field's type: plain, a list of plain values, or a list of lists."""
    name, depth = str(annotation), 0
    while name.startswith("list["):
        name, depth = name[5:-1], depth + 1
    if not _fits(_PLAIN[name], value, depth):
        raise TypeError(f"{value!r:.100} is not a {annotation}")


def _fits(kind: type[Any], value: object, depth: int) -> bool:
    if depth:
        return isinstance(value, list) and all(_fits(kind, one, depth - 1) for one in value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
