"""Define the messages between agents and the coordinator.

Agents send events, and the coordinator sends commands. Every message is a plain record, encoded
with msgpack. Messages contain ages instead of timestamps, because clocks of different nodes cannot
be compared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack

from echelon.errors import LaunchError

VERSION = 10
MAX_MESSAGE_BYTES = 8 << 20
DUMP_PART_BYTES = 1 << 20

# ---- events: agent -> coordinator ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """An event: a node asks to join the job."""

    node: str  # unique for this agent
    host: str
    num_workers: int
    node_rank: int = -1  # -1: any
    version: int = VERSION
    address: str = ""  # numeric, as seen by the link; the node's own claim is ignored
    port: int = 0  # at which it could host the job; 0: it cannot
    holds: int = -1  # the world whose ranks it has, after the loss of a host
    life_port: int = 0  # refuses connections once this launcher has ended; 0: none


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """An event: a node's reply to `LeaseBeat` or `Entrust`.

    `version` is the version of the mandate that the node holds.
    """

    term: int
    number: int
    stamp: int
    version: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """An event: a node cut off from its host asks for a vote and for the name of the new host.

    The reply is a `Vote`.
    """

    node: str
    term: int
    version: list[int]
    is_binding: bool
    founder: str = ""  # of the job, for a witness


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    """A host's message to the witness, usually a heartbeat. The reply is a `LeaseReply`.

    If `number` is 0, the message is not a heartbeat: it conveys only the mandate.
    """

    founder: str
    term: int
    host: str
    number: int
    holds: bool  # the lease lasts without the witness's reply
    promise_ms: int
    mandate: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """An event: a previously admitted node has reconnected.

    `received` is the number of the last message that the node received.
    """

    node: str
    token: str
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """An event: a worker has ended. `code` is a return code as in `subprocess`.

    If the worker could not be started, `code` is 127 and `error` states the reason.
    """

    attempt: int
    rank: int
    code: int
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sights:
    """An event: a node reports on its live ranks.

    `folded` aggregates all ranks with an open ring; it is [] if there are none. Its elements are:

    - the node's first rank
    - whether any of these ranks is initialized (its world group exists)
    - the time since the last progress in ms (-1: none)
    - the age of the oldest pending operation in ms (-1: none)
    - the rank with the oldest pending operation
    - the number of signs of progress
    - the number of dumps that torch wrote on its own

    `ranks` contains one list for each rank that has no ring or has closed its ring:

    - the rank
    - whether the rank has connected to the store
    - the time since the last progress in ms (-1: none)
    - the age of the oldest pending operation in ms (-1: none)
    - the number of signs of activity
    - 0, because the rank does not have an open ring
    - the number of dumps that torch wrote on its own

    `dumped_rank` is the rank, among those aggregated in `folded`, that wrote the latest dump; -1 if
    none of them wrote one. The remaining fields summarize the histories of these ranks; see
    `limits.node.Summary`.
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
    """An event: a node reports the progress of its ranks and how they spent their time.

    A lap is one or more consecutive steps of one rank. `laps` contains one list for each lap since
    the last report, with these elements:

    - the rank
    - the first step
    - one past the last step
    - how long ago the lap started and ended, in us (two elements)
    - how long the rank waited, handled checkpoints and loaded data, in us (three elements)

    `ranks` contains one list per rank:

    - the rank
    - the current step (-1: none)
    - the time since the last sign of progress in ms (-1: none)
    - the step of the last saved checkpoint (-1: none)
    - the number of checkpoints loaded
    - how long the rank has waited, handled checkpoints and loaded data in the unfinished step, in
      us (three elements)
    """

    attempt: int
    laps: list[list[int]]
    ranks: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standings:
    """An event: a node reports the state of its ranks in `resilient.run`.

    `ranks` contains one list for each rank whose state has changed since the previous report:

    - the rank
    - the numeric code of the rank's state
    - the rank's epoch
    - the first step of that epoch
    - the number of steps that the rank must repeat in this epoch
    - how long ago the rank became ready, in ms (-1: not ready)
    - when the rank became ready, in ns on its node's monotonic clock; comparable only with the
      timestamps in the rank's own black box
    - the epoch that the rank is entering, if new ranks join during that epoch; 0 otherwise
    """

    attempt: int
    ranks: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unkillable:
    """An event: a worker survived SIGKILL.

    `why` explains why the worker still exists; see `node.unkillable.why_it_lives`.
    """

    attempt: int
    rank: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpPart:
    """An event: one part of a rank's dump. The parts of a dump are sent in order."""

    incident: int
    rank: int
    data: bytes
    is_torchs: bool = False  # whether it belongs to torch's own dump


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvested:
    """An event: a node has sent all its dumps."""

    incident: int
    exit_codes: list[list[int]]  # [rank, code] of the ranks that ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """An event: all workers of an attempt on this node, and all their descendants, have ended."""

    attempt: int
    exit_codes: list[list[int]]  # [rank, code]
    stopped: list[int]  # ranks that the agent had to stop


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAsked:
    """An event: the user sent this node's launcher a signal that stops the job."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """An event: a node has disconnected. The server creates this event; no node sends it."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A status client's request for the job's state, to which the coordinator replies once."""

    version: int = VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Statuses:
    """The states of a node's ranks, which the coordinator forwards to the status client."""

    visitor: str
    host: str
    numbers: list[
        list[int]
    ]  # a rank's number, sequence, lag in ms, step, step time in us; -1: none
    words: list[list[str]]  # the same rank's phase and operation


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckIn:
    """An event: a node joins the pre-job checks, and listens on `port`."""

    host: str
    port: int
    versions: list[list[str]]  # [name, version]
    address: str = ""  # numeric, as seen by the link
    token: str = ""  # which its listener requires
    folder: str = ""  # where its part of the job would keep files


@dataclass(frozen=True, kw_only=True, slots=True)
class Tock:
    """The reply to `Tick`: this node's wall-clock time."""

    number: int
    wall_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WaysTried:
    """The reply to `TryWays`: one [host, error] pair for each node.

    The error is "" if the replying node could connect to that node.
    """

    found: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """The reply to `Probe`: one finding per task, in order, each packed with `Finding.pack`."""

    number: int
    findings: list[str]


Event = (
    Hello | WorkerEnded | Sights | DumpPart | Harvested | Idle | StopAsked | Left | Ask | Statuses
    | Unkillable | Resume | CheckIn | Tock | WaysTried | LeaseReply | Poll | Renew | Laps
    | Probed | Standings
)  # fmt: skip

# ---- commands: coordinator -> agent ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The reply to a greeting, with the host's settings, which apply to all nodes."""

    token: str  # identifies the session at the next connection
    received: int
    lost_after_ms: int
    beat_ms: int = 500  # the longest time between two frames of either side


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseBeat:
    """A host's heartbeat to a node. `echo` is the stamp of the node's last reply (0: none)."""

    term: int
    host: str
    number: int
    echo: int
    remaining_ms: int
    promise_ms: int  # how long it binds an elector; the host's setting holds on all nodes
    holds: bool = False  # to the witness: the lease lasts without its reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrust:
    """A command: store a mandate (the job's replicated state), as encoded by `pack_mandate`."""

    mandate: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """An elector's reply to `Poll`."""

    term: int
    granted: bool
    early: bool
    host: str
    endpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A command: start this node's workers."""

    attempt: int  # the number of its folders on the coordinator's node
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
    on_loss: str = "end"
    join_after: int = -1  # the newest epoch, if the ranks replace those of a lost node
    lives: list[int] = field(default_factory=list)  # of each rank then: how many processes before


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A command: signal all workers, and kill the workers that outlive the grace period.

    Only the first `Stop` of an attempt signals the workers. If `urgent` is set, the node does not
    wait for an incident to be collected first. The ranks in `hung` are killed after one second.
    """

    number: int
    grace_ms: int
    urgent: bool = False
    hung: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A command: send SIGKILL to all workers that are still running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillRanks:
    """A command: send SIGKILL to the given ranks. The other ranks continue without them."""

    attempt: int
    ranks: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replace:
    """A command: start a process to replace a lost rank.

    The lost rank's folder is renamed, not deleted.
    """

    attempt: int
    rank: int
    epoch: int  # the newest one: the process joins in a later one
    life: int = 1  # how many processes held the rank before


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect:
    """A command: take a snapshot of this node's ranks and send their dumps."""

    incident: int
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearUp:
    """A command: end the processes that workers left behind, flush all output, and send `Idle`."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """A command: print a message on this node, such as a verdict."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """A command: end this node's launcher with `exit_code`, because the job has ended."""

    exit_code: int
    ended_by: str
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellStatus:
    """A command: send the state of this node's ranks to a status client, as `Statuses`."""

    visitor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShown:
    """The state of the job for a status client. One `Statuses` message per node follows."""

    job_id: str
    phase: str
    restarts: int
    world_size: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A command: reply with `Tock` at once."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TryWays:
    """A command: try to connect to each of `places`, given as [host, address, port] lists."""

    places: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A command: run several probes at the same time, and reply with `Probed`.

    Each task is packed with `Task.pack`.
    """

    number: int
    tasks: list[str]


Command = (
    Start | Stop | Kill | KillRanks | Replace | Collect | ClearUp | Show | Over | TellStatus
    | JobShown | Statuses | Tick | TryWays | Welcome | LeaseBeat | Entrust | Vote | Probe
)  # fmt: skip

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Hello, WorkerEnded, Sights, DumpPart, Harvested, Idle, StopAsked, Ask, Statuses,
        CheckIn, Tock, WaysTried, Unkillable, Resume, Welcome, Laps,
        Start, Stop, Kill, Collect, ClearUp, Show, Over, TellStatus, JobShown, Tick, TryWays,
        LeaseBeat, LeaseReply, Entrust, Poll, Renew, Vote, Probe, Probed,
        Standings, KillRanks, Replace,
    )
}  # fmt: skip


def pack(message: Event | Command) -> bytes:
    """Serialize a message."""
    data: bytes = msgpack.packb([type(message).__name__, asdict(message)], use_bin_type=True)
    return data


def unpack(data: bytes) -> Event | Command:
    """Deserialize a message that was serialized by `pack`.

    Raises:
        LaunchError: the bytes are not a valid message.
    """
    try:
        name, values = msgpack.unpackb(data, raw=False)
        kind = _KINDS[name]
        # A newer version may have more fields, but its greeting must be readable to be refused.
        known = {f.name: values[f.name] for f in fields(kind) if f.name in values}
        for one in fields(kind):
            _check(one.type, known.get(one.name, one.default))
        message: Event | Command = kind(**known)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as err:
        raise LaunchError(f"malformed message: {err}") from err
    return message


_PLAIN: dict[str, type[Any]] = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def _check(annotation: object, value: object) -> None:
    """Check that a value has its field's type: a plain type or a (nested) list of such a type.

    Raises:
        TypeError: the value has another type.
    """
    name, depth = str(annotation), 0
    while name.startswith("list["):
        name, depth = name[5:-1], depth + 1
    if not _fits(_PLAIN[name], value, depth):
        raise TypeError(f"expected {annotation}, got {value!r:.100}")


def _fits(kind: type[Any], value: object, depth: int) -> bool:
    if depth:
        return isinstance(value, list) and all(_fits(kind, one, depth - 1) for one in value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
