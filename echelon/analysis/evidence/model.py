"""The common representation of all ranks' records, on which the rules operate.

Each rank's record becomes rows that refer to tables shared by all ranks. Identical calls have the
same number, so array operations can compare ranks. Timestamps are on rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.calls import Call, Tables
from echelon.recorder.format.schema import Fault, Group, HostFacts, Identity, LastWords, Live

ROW = np.dtype(
    [
        ("sequence", "<i8"),  # among the group's collectives; -1 for p2p
        ("created_ns", "<i8"),  # all stamps on rank 0's clock; 0: has not happened
        ("started_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("num_bytes", "<i8"),
        ("p2p_sequence", "<i4"),
        ("op_id", "<i4"),  # of torch's: counts all of a group's operations, parts of batches too
        ("step", "<i4"),
        ("group", "<i4"),  # into Evidence.groups
        ("call", "<i4"),  # into Tables.calls
        ("site", "<i4"),  # into Tables.texts
        ("stack", "<i4"),  # into Tables.texts
        ("error", "<i4"),  # into Tables.texts
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("coalesced", "<i4"),
        ("thread", "<u4"),
        ("flags", "<u2"),
        ("state", "u1"),
    ]
)
SPAN_ROW = np.dtype(
    [("started_ns", "<i8"), ("ended_ns", "<i8"), ("name", "<i4"), ("site", "<i4"), ("step", "<i4")]
)
DATA_WAIT, DATA_END = "data_wait", "data_end"  # a fetch of a batch; an iteration that ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """The contents of `incident.json`: the reason for a snapshot, and the state of the job."""

    kind: str = ""  # "failure", "stall", "signal"; "": no incident, rings or foreign dumps
    number: int = 0
    attempt: int = 0
    world_size: int = 0
    reason: str = ""
    is_early: bool = False  # taken because of a learned limit, so that little time has passed yet
    lost: tuple[int, ...] = ()  # ranks of a lost node, if that loss was the first failure
    ended: tuple[int, ...] = ()  # ranks in the order in which the coordinator learned of their ends
    absent: Mapping[int, str] = field(default_factory=dict)  # rank -> why there is no dump of it
    probes: tuple[str, ...] = ()  # what was measured of suspect nodes before the attempt
    # Rank -> the first epoch in which the job continued without it: that loss is over.
    lost_earlier: Mapping[int, int] = field(default_factory=dict)
    # Rank -> how many of its processes were replaced before. Only ranks that are to be replaced now
    # are listed: their folders will be set aside.
    set_aside: Mapping[int, int] = field(default_factory=dict)
    epoch_since_ns: int = 0  # when the present epoch began, by the host's monotonic clock
    # The same for ranks on other nodes than the host, each by its own node's clock.
    epoch_since_there_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A named phase of a rank's program, with times on rank 0's clock."""

    name: str
    detail: str
    site: str
    step: int
    started_ns: int
    ended_ns: int  # 0: still open
    thread: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """The evidence from one rank.

    `rows` [num_operations] has dtype `ROW` and is sorted oldest first.
    """

    rank: int
    rows: npt.NDArray[Any]
    identity: Identity
    open_spans: tuple[Span, ...] = ()
    spans: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, SPAN_ROW))
    live: tuple[int, ...] = (0,) * Live.NUM_WORDS
    last_words: LastWords | None = None  # of the process
    thread_words: LastWords | None = None  # of an earlier thread that ended by an exception
    fault: Fault | None = None
    host: HostFacts = field(default_factory=HostFacts)
    has_ring: bool = True
    seen_ns: int = 0  # when the rank was last looked at, on rank 0's clock; 0: not known
    # Group -> number of the last collective entered, if counters record it in addition to the rows.
    entered: Mapping[int, int] = field(default_factory=dict)
    completed: Mapping[int, int] = field(default_factory=dict)  # the same of the last completed

    @property
    def offset_ns(self) -> int:
        """The offset from this rank's monotonic clock to rank 0's clock."""
        return self.identity.clock_offset_ns


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All evidence about a job, with tables that the rows of all ranks refer to."""

    world_size: int
    ranks: Mapping[int, RankEvidence]
    groups: Sequence[Group]
    tables: Tables
    incident: Incident = field(default_factory=Incident)
    origin: str = ""
    foreign: str = ""  # "": echelon's black boxes; else the source: "torch nccl", "logs"
    vague_groups: frozenset[int] = frozenset()  # members were inferred, not recorded
    is_world_inferred: bool = False  # no record gives the number of ranks
    unreadable: tuple[int, ...] = ()  # ranks whose file exists but cannot be read
    warnings: tuple[str, ...] = ()
    job_log: str = ""  # log lines of no rank in particular: launcher, scheduler

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that left no readable record.

        Ranks that the job lost before this incident are not included.
        """
        known = self.ranks.keys() | self.incident.lost_earlier.keys()
        return tuple(rank for rank in range(self.world_size) if rank not in known)

    def call(self, row: Any) -> Call:
        """Return a row's call."""
        return self.tables.calls[int(row["call"])]

    def site(self, row: Any) -> str:
        """Return the call site of a row, or "" if unknown."""
        return self.tables.texts[int(row["site"])]

    def error(self, row: Any) -> str:
        """Return a row's error, or "" if none is recorded."""
        return self.tables.texts[int(row["error"])]
