"""What is seen of a process from outside, as an incident keeps it.

This module only declares. None, "" or -1: not known, or not permitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How a rank's stacks were read: from its memory, which nothing in it notices; by a thread of its
# own; or by a signal, which may end a system call that it waits in.
OUTSIDE, ITSELF, SIGNAL = "outside", "itself", "signal"
TRACING = "ptrace"  # among `not_permitted`: its stacks and memory may not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Socket:
    """A TCP connection of a rank, as its host sees it. -1: the kernel did not say."""

    local: str = ""  # "10.0.0.1:29500"
    peer: str = ""
    state: str = ""  # "ESTABLISHED", ...
    unread_bytes: int = 0  # they have arrived, and the rank has not taken them
    unsent_bytes: int = 0  # or sent, and not acknowledged
    retransmits: int = -1
    sent_bytes: int = -1  # and acknowledged, since it was opened
    received_bytes: int = -1
    moved_bytes: int = -1  # both ways, during the snapshot's sample


GLOO_THREAD = "pt_gloo_runloop"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostThread:
    """A thread of a rank that records nothing, as its host sees it."""

    name: str = ""
    call: str = ""  # the kernel call it waits in; "": it runs, or that is not known
    timed: bool = False  # it waits in a futex with a timeout

    @property
    def is_gloos(self) -> bool:
        """Whether it is one of those on which torch's Gloo backend runs its collectives."""
        return self.name == GLOO_THREAD

    @property
    def is_in_collective(self) -> bool:
        """Whether it is inside one: only for its peers does it wait with a timeout."""
        return self.is_gloos and self.call == "futex" and self.timed


@dataclass(frozen=True, kw_only=True, slots=True)
class HostChild:
    """A process below a rank: a loader's worker, a compiler, a helper of a checkpoint."""

    pid: int = 0
    command: str = ""  # its command line, shortened
    state: str = ""  # /proc state letter; "Z": it is dead, and its parent has not noticed
    call: str = ""  # the kernel call that its main thread waits in; "": it runs, or not known
    wait_channel: str = ""
    exit_code: int | None = None  # of a dead one, as in `subprocess`
    stacks: str = ""  # of its main thread, in faulthandler's form


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What the agent saw of a rank from outside. None or "": not known, or not permitted."""

    alive: bool | None = None
    exit_code: int | None = None  # as in `subprocess`: -9 is SIGKILL
    exited_mono_ns: int = 0
    exit_order: int = -1  # 0: the first rank of this attempt that ended; -1: it has not
    stopped_by_agent: bool = False  # the agent's own signal ended it
    process_state: str = ""  # /proc state letter: R S D T Z ...
    wait_channel: str = ""
    cpu_share: float | None = None  # of one core, over the snapshot's sample
    rss_bytes: int | None = None
    oom_kill: bool | None = None
    stacks: str = ""  # faulthandler's text, most recent call first
    stacks_from: str = ""  # OUTSIDE, ITSELF or SIGNAL
    native_stacks: str = ""  # C frames of threads that wait in the kernel, read from outside
    stderr_tail: str = ""
    error_file: str = ""  # the traceback, or else the message, in TORCHELASTIC_ERROR_FILE
    snapshot_mono_ns: int = 0
    later_gap_s: float = 0.0  # a stall is looked at twice, this far apart; 0: only once
    later_recorded: int = -1  # operations, spans and steps begun or ended in between; -1: unknown
    later_stacks: str = ""  # the stacks at the second look
    later_heartbeat_mono_ns: int = 0  # the Python heartbeat at the second look
    num_threads: int | None = None
    frozen: bool | None = None  # its cgroup is
    throttled_share: float | None = None  # of the sample, by the cgroup's processor limit
    memory_bytes: int | None = None  # of the cgroup, and its limit
    memory_limit_bytes: int | None = None
    pressure: Mapping[str, float] = field(default_factory=dict)  # cpu, io, memory: see cgroup.py
    sockets: tuple[Socket, ...] = ()
    threads: tuple[HostThread, ...] = ()  # of ranks without a ring; the first one is the main one
    children: tuple[HostChild, ...] = ()  # the processes below it
    num_children: int = 0  # how many there were; `children` has the first of them
    not_permitted: tuple[str, ...] = ()
