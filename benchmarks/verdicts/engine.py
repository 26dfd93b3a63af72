"""Simulate ranks that run a program on a host and a device, as a discrete-event model.

A rank has a host that executes instructions, and a device with one in-order stream for kernels and
one in-order queue per communicator. A collective is *created* when the host enqueues it. It is
*started* when its kernel reaches the head of its queue and the compute stream has reached the point
of the call, and *ended* when every member's kernel has run. As in NCCL's process group, unbatched
sends and receives use one communicator per pair, and batches use their group's communicator.

The model is independent of how its output is analyzed. It keeps the time of every event, so that a
recorder's view of any moment can be written afterwards.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

HOST_STEP_S = 10e-6  # what enqueuing one thing costs the host
NEVER = float("inf")
CommKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: torch's name for it, its description and its members."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One send or receive; `peer` is a global rank."""

    way: str  # "send" or "recv"
    peer: int
    sizes: tuple[int, ...]
    dtype: str = "Float"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An instruction to enqueue one operation.

    Attributes:
        parts: the messages of a point-to-point call; () for a collective.
        batched: True if the messages use the group's communicator, in one launch.
        blocking: True if the compute stream waits for the operation immediately.
        after_compute: True if the operation waits for the work on the compute stream at the call.
        sends: elements sent to each member of an all_to_all; recorders do not see them.
    """

    group: Group
    operation: str = ""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtype: str = "Float"
    root: int = -1
    parts: tuple[Part, ...] = ()
    batched: bool = False
    blocking: bool = True
    after_compute: bool = True
    tag: str = ""
    line: int = 10
    function: str = "train_step"
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    unnoticed: bool = False  # the device stops just after its peers have what they need
    broken: bool = False  # the arguments fit on none of the ranks


@dataclass(frozen=True, slots=True)
class Host:
    """An instruction to compute on the host."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """An instruction to run a kernel on the compute stream; with NEVER, it does not end."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """An instruction that makes the compute stream wait for the operation with a tag."""

    tag: str


class Sync:
    """An instruction that makes the host wait for the device, like `loss.item()`."""


class Hang:
    """An instruction at which the host hangs indefinitely."""


class Die:
    """An instruction at which the process dies and its device stops."""


Instruction = Call | Host | Kernel | Wait | Sync | Hang | Die


@dataclass(slots=True, eq=False)
class Launch:
    """One operation of one rank, with its times in seconds; None if it has not happened."""

    rank: int
    call: Call
    collective_seq: int
    p2p_seq: int
    op_id: int
    created: float
    ready: bool = False
    started: float | None = None
    ended: float | None = None
    due: bool = False  # its end is scheduled
    owed: int = 0  # messages that have not met their counterpart


@dataclass(slots=True)
class Rank:
    """The state of one rank."""

    rank: int
    program: Sequence[Instruction]
    launches: list[Launch] = field(default_factory=list)
    at: int = 0
    main: deque[Kernel | Launch | tuple[str, Launch]] = field(default_factory=deque)
    is_computing: bool = False
    host_waits: bool = False
    device_stopped: bool = False
    dead_at: float = NEVER
    finished_at: float = NEVER
    counters: dict[str, list[int]] = field(default_factory=dict)  # collective, p2p, op
    queues: dict[CommKey, deque[Launch]] = field(default_factory=dict)
    tags: dict[str, Launch] = field(default_factory=dict)


class Engine:
    """A simulator that runs the programs of all ranks until no event is left."""

    def __init__(
        self,
        programs: Sequence[Sequence[Instruction]],
        *,
        run_ahead: int = 64,
        link_s: float = 4e-4,
    ) -> None:
        self.ranks = [Rank(rank, program) for rank, program in enumerate(programs)]
        self.now = 0.0
        self._run_ahead = run_ahead
        self._link_s = link_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._collectives: dict[tuple[Group, int], dict[int, Launch]] = {}
        self._messages: dict[tuple[CommKey, int, int, str], list[tuple[Launch, Part]]] = {}
        self.cut_pairs: frozenset[frozenset[int]] = frozenset()
        self.cut_at = NEVER

    def run(self) -> float:
        """Run to the end and return the time of the last event."""
        for rank in self.ranks:
            self._later(0.0, lambda rank=rank: self._host(rank))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.now

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, act))

    # ---- the host ----

    def _host(self, rank: Rank) -> None:
        if rank.dead_at < NEVER:
            return
        if rank.at >= len(rank.program):
            rank.finished_at = self.now
            return
        if len(rank.main) >= self._run_ahead:
            rank.host_waits = True
            return
        instruction = rank.program[rank.at]
        delay_s = HOST_STEP_S
        if isinstance(instruction, Hang):
            return
        if isinstance(instruction, Die):
            rank.dead_at = self.now
            rank.device_stopped = True
            return
        if isinstance(instruction, Sync):
            if rank.main or rank.is_computing:
                rank.host_waits = True
                return
        elif isinstance(instruction, Host):
            delay_s = instruction.seconds
        elif isinstance(instruction, Kernel):
            rank.main.append(instruction)
        elif isinstance(instruction, Wait):
            rank.main.append(("wait", rank.tags[instruction.tag]))
        else:
            self._enqueue(rank, instruction)
        rank.at += 1
        self._main(rank)
        self._later(delay_s, lambda: self._host(rank))

    def _wake(self, rank: Rank) -> None:
        if not rank.host_waits:
            return
        syncs = isinstance(rank.program[rank.at], Sync)
        if (not rank.main and not rank.is_computing) if syncs else len(rank.main) < self._run_ahead:
            rank.host_waits = False
            self._later(0.0, lambda: self._host(rank))

    def _enqueue(self, rank: Rank, call: Call) -> None:
        counters = rank.counters.setdefault(call.group.name, [0, 0, 0])
        counters[1 if call.parts else 0] += 1
        counters[2] += max(1, len(call.parts))
        launch = Launch(rank.rank, call, counters[0], counters[1], counters[2], self.now)
        launch.owed = len(call.parts)
        rank.launches.append(launch)
        rank.queues.setdefault(comm_key(launch), deque()).append(launch)
        if call.tag:
            rank.tags[call.tag] = launch
        if call.after_compute:
            rank.main.append(launch)
        else:
            launch.ready = True
            self._comm(rank, comm_key(launch))
        if call.blocking:
            rank.main.append(("wait", launch))

    # ---- the device ----

    def _main(self, rank: Rank) -> None:
        while rank.main and not rank.is_computing and not rank.device_stopped:
            head = rank.main[0]
            if isinstance(head, Kernel):
                rank.is_computing = True
                rank.main.popleft()
                if head.seconds < NEVER:
                    self._later(head.seconds, lambda: self._computed(rank))
                return
            if isinstance(head, tuple):
                if head[1].ended is None:
                    return
                rank.main.popleft()
            else:
                rank.main.popleft()
                head.ready = True
                self._comm(rank, comm_key(head))
        self._wake(rank)

    def _computed(self, rank: Rank) -> None:
        rank.is_computing = False
        self._main(rank)
        self._wake(rank)

    def _comm(self, rank: Rank, key: CommKey) -> None:
        queue = rank.queues[key]
        if not queue or rank.device_stopped:
            return
        head = queue[0]
        if not head.ready or head.started is not None:
            return
        head.started = self.now
        if head.call.parts:
            self._meet_messages(head, key)
        else:
            self._meet(head)

    def _meet(self, launch: Launch) -> None:
        group = launch.call.group
        there = self._collectives.setdefault((group, launch.collective_seq), {})
        there[launch.rank] = launch
        if finishes_early(launch):
            self._end_soon(launch)
        if len(there) == len(group.ranks):
            for one in _served([there[rank] for rank in group.ranks]):
                self._end_soon(one)

    def _meet_messages(self, launch: Launch, key: CommKey) -> None:
        for part in launch.call.parts:
            sends = part.way == "send"
            pair = (launch.rank, part.peer) if sends else (part.peer, launch.rank)
            mine = self._messages.setdefault((key, *pair, part.way), [])
            mine.append((launch, part))
            theirs = self._messages.setdefault((key, *pair, "recv" if sends else "send"), [])
            if len(theirs) < len(mine):
                continue
            other, its_part = theirs[len(mine) - 1]
            if part.sizes == its_part.sizes and part.dtype == its_part.dtype:
                for one in (launch, other):
                    one.owed -= 1
                    if not one.owed:
                        self._end_soon(one)

    def _end_soon(self, launch: Launch) -> None:
        if launch.due or self._is_cut(launch):
            return
        launch.due = True
        self._later(self._link_s, lambda: self._ended(launch))

    def _is_cut(self, launch: Launch) -> bool:
        if self.now < self.cut_at:
            return False
        ranks = [part.peer for part in launch.call.parts] or list(launch.call.group.ranks)
        pairs = self.cut_pairs
        return any(frozenset((a, b)) in pairs for a in {*ranks, launch.rank} for b in ranks)

    def _ended(self, launch: Launch) -> None:
        rank = self.ranks[launch.rank]
        if launch.call.unnoticed:
            rank.device_stopped = True
        if rank.device_stopped:
            return
        launch.ended = self.now
        key = comm_key(launch)
        rank.queues[key].popleft()
        self._comm(rank, key)
        self._main(rank)


def comm_key(launch: Launch) -> CommKey:
    """Return the key of a launch's communicator: its group's, or its pair's."""
    call = launch.call
    if not call.parts or call.batched:
        return (call.group.name, call.group.ranks)
    return (call.group.name, *sorted((launch.rank, call.parts[0].peer)))


def finishes_early(launch: Launch) -> bool:
    """Return whether a rank only sends data, so that its kernel need not wait for all others."""
    call = launch.call
    if call.operation == "broadcast":
        return call.root == launch.rank
    return call.operation == "reduce" and call.root != launch.rank


def _served(launches: Sequence[Launch]) -> Iterable[Launch]:
    """Return the launches whose kernels can end now that the kernels of all members run."""
    first = launches[0].call
    if any(launch.call.broken or not _fits(launch.call, first) for launch in launches):
        return []
    if not all(launch.call.sends for launch in launches):
        return launches
    sends = [launch.call.sends for launch in launches]
    receives = [launch.call.receives for launch in launches]
    everyone = range(len(launches))
    return [
        launch
        for i, launch in enumerate(launches)
        if all(sends[i][j] <= receives[j][i] and receives[i][j] <= sends[j][i] for j in everyone)
    ]


def _fits(call: Call, other: Call) -> bool:
    if call.operation != other.operation or call.dtype != other.dtype or call.root != other.root:
        return False
    if call.sends or call.operation in ("gather", "scatter"):
        return True
    return _numel(call.inputs) == _numel(other.inputs) and _numel(call.outputs) == _numel(
        other.outputs
    )


def _numel(sizes: Iterable[Sequence[int]]) -> int:
    return sum(prod(size) for size in sizes)
