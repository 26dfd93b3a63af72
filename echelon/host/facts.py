"""Define the facts about a process that are observed from outside and stored in an incident.

The values None, "" and -1 mean that a fact is unknown or that reading it was not permitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How a rank's stacks were read: from its memory, without disturbing it; by a thread of its own; or
# by a signal, which may interrupt a system call in which it waits.
OUTSIDE, ITSELF, SIGNAL = "outside", "itself", "signal"
TRACING = "ptrace"  # among `not_permitted`: its stacks and memory may not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Socket:
    """A TCP socket of a rank, as reported by the kernel; -1 means that a count is unknown."""

    local: str = ""  # "10.0.0.1:29500"
    peer: str = ""
    state: str = ""  # "ESTABLISHED", ...
    unread_bytes: int = 0  # arrived, but not yet read by the rank
    unsent_bytes: int = 0  # or sent but not acknowledged
    retransmits: int = -1
    sent_bytes: int = -1  # and acknowledged, since the connection was opened
    received_bytes: int = -1
    moved_bytes: int = -1  # both ways, during the snapshot's sample


GLOO_THREAD = "pt_gloo_runloop"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostThread:
    """A thread of a rank, as shown in /proc."""

    name: str = ""
    call: str = ""  # the kernel call in which it waits; "" if it runs, or if the call is not known
    timed: bool = False  # it waits in a futex with a timeout

    @property
    def is_gloos(self) -> bool:
        """True if torch's Gloo backend runs collectives on this thread."""
        return self.name == GLOO_THREAD

    @property
    def is_in_collective(self) -> bool:
        """True if this is a Gloo thread in a collective, waiting on a futex with a timeout."""
        return self.is_gloos and self.call == "futex" and self.timed


@dataclass(frozen=True, kw_only=True, slots=True)
class HostChild:
    """A descendant of a rank, such as a DataLoader worker, a compiler or a checkpoint helper."""

    pid: int = 0
    command: str = ""  # its command line, shortened
    state: str = ""  # /proc state letter; "Z": it is dead, and its parent has not waited for it
    call: str = ""  # the kernel call in which its main thread waits; "" if it runs, or not known
    wait_channel: str = ""
    exit_code: int | None = None  # of a dead process, as in `subprocess`
    stacks: str = ""  # of its main thread, in faulthandler's form


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """The agent's observations about a rank. None and "" mean unknown or not permitted."""

    alive: bool | None = None
    exit_code: int | None = None  # as in `subprocess`: -9 is SIGKILL
    exited_mono_ns: int = 0
    exit_order: int = -1  # 0 for the first rank of this attempt to end; -1 if it has not ended
    stopped_by_agent: bool = False  # whether the agent's own signal ended it
    process_state: str = ""  # /proc state letter: R S D T Z ...
    wait_channel: str = ""
    cpu_share: float | None = None  # of one core, over the snapshot's sample
    rss_bytes: int | None = None
    oom_kill: bool | None = None
    stacks: str = ""  # faulthandler's text, most recent call first
    stacks_from: str = ""  # OUTSIDE, ITSELF or SIGNAL
    native_stacks: str = ""  # C frames of threads that wait in the kernel, read from outside
    stderr_tail: str = ""
    error_file: str = ""  # the traceback, or otherwise the message, from TORCHELASTIC_ERROR_FILE
    snapshot_mono_ns: int = 0
    later_gap_s: float = 0.0  # a stall is examined twice, this far apart; 0 means only once
    later_recorded: int = -1  # operations, spans and steps begun or ended in between; -1 if unknown
    later_stacks: str = ""  # the stacks in the second snapshot
    later_heartbeat_mono_ns: int = 0  # the Python heartbeat in the second snapshot
    num_threads: int | None = None
    frozen: bool | None = None  # whether its cgroup is frozen
    throttled_share: float | None = None  # of the sample, by the cgroup's CPU quota
    memory_bytes: int | None = None  # of the cgroup, and its limit
    memory_limit_bytes: int | None = None
    pressure: Mapping[str, float] = field(default_factory=dict)  # cpu, io, memory: see cgroup.py
    sockets: tuple[Socket, ...] = ()
    threads: tuple[HostThread, ...] = ()  # of ranks without a ring; the main thread is first
    children: tuple[HostChild, ...] = ()  # the processes below it
    num_children: int = 0  # how many descendants there were; `children` holds the first of them
    not_permitted: tuple[str, ...] = ()
