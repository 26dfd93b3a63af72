"""Define the contents of a black box: fields, dtypes, units, and the version of the format.

The writer, the readers and `echelon.analysis` share this module, which contains only declarations.
Everything is little-endian. Every stamp is a reading of the monotonic clock in nanoseconds; 0 means
that the event has not happened. Every rank is a global rank.

A new field increments `FORMAT_MINOR`; a changed or removed field increments `FORMAT_MAJOR`. Readers
accept any minor version of their own major version. `docs/dump-format.md` describes the format in
prose.

[Note: what makes a slot readable] A slot is `stamp, length, crc, payload, stamp`. The writer fills
a slot from front to back. A reader accepts a slot only if both stamps agree and belong to the slot,
and if the CRC32 of the payload matches. The CRC is needed on weakly ordered machines, because
Python has no memory fences.

[Note: two kinds of strings] Strings that a program uses repeatedly (groups, call sites, operations,
names of spans) are stored once, in the string table. Strings that can differ at every call (shapes
and splits, details of spans, errors) go into `recent`, a log that wraps around. Each entry of
`recent` contains its own position, so that a reader can detect an overwritten entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.host.facts import SIGNAL as SIGNAL
from echelon.host.facts import TRACING as TRACING
from echelon.host.facts import HostChild as HostChild
from echelon.host.facts import HostFacts as HostFacts
from echelon.host.facts import HostThread as HostThread
from echelon.host.facts import Socket as Socket

FORMAT_MAJOR = 2
FORMAT_MINOR = 5
RING_MAGIC = b"ECHELRNG"
DUMP_KIND = "echelon-dump"
# A dump is one msgpack map whose last entry is the CRC32 of all bytes before it: this, 4 bytes.
DUMP_CRC_MARK = b"\xa5crc32\xc4\x04"

PAGE_BYTES = 4096
STRINGS_BYTES = 1 << 20
# Names leave room for call sites, and both for groups: two groups must never look like one.
NAMES_BYTES = STRINGS_BYTES * 3 // 4
SITES_BYTES = STRINGS_BYTES * 15 // 16
TABLE_FULL = "<table full>"
RECENT_BYTES = 1 << 19
RECENT_UNIT = 16  # bytes: entries begin at multiples of it, and references count in this unit
IS_RECENT = 1 << 31  # bit of a reference to a text: it points into `recent`
NUM_KEPT = 64
MAX_TENSORS = 8  # inline in a slot; more are summarized
MAX_DIMS = 8
MAX_SPLITS = 64  # input and output splits together
NUM_OPEN_SPANS = 64
MAX_SLOTS = 1 << 20  # of operations, and of spans
MAX_RANKS = 1 << 20  # that all groups of one file name together
DEFAULT_NUM_OPERATIONS = 4096
DEFAULT_NUM_SPANS = 1024


class State(IntEnum):
    """The progress of an operation."""

    EMPTY = 0
    CREATED = 1
    STARTED = 2
    COMPLETED = 3
    FAILED = 4


class Flag(IntEnum):
    """The bits of an operation's `flags`."""

    P2P = 1
    ASYNC = 2
    SUMMARIZED = 4  # more tensors, dims or splits than fit: see `Signature.summary`


class Live(IntEnum):
    """The indices of the u64 words (counters and stamps) in a ring's live page."""

    HEARTBEAT_MONO_NS = 0  # from a Python thread: late while other code holds the lock
    PROGRESS_MONO_NS = 1  # last operation, span or step that began or ended
    NUM_OPERATIONS = 2  # begun since the start
    NUM_SPANS = 3  # ended since the start
    STEP = 4  # training step plus one; 0: `step()` was never called
    STEP_MONO_NS = 5
    STRINGS_USED_BYTES = 6
    STRINGS_REFUSED = 7
    OPEN_SPANS_REFUSED = 8
    CLOSED = 9  # 1: the recorder was closed in an orderly way
    INITIALIZED = 10  # 1: the world group exists
    NUM_GC_PAUSES = 11  # collections of Python's garbage, including short ones
    GC_PAUSES_NS = 12  # their total duration
    RECENT_UNITS = 13  # written to `recent` since the start
    NUM_KEPT = 14  # places in use for operations that outlived their slots
    KEPT_REFUSED = 15  # operations not recorded because pending ones held all places
    NATIVE_HEARTBEAT_MONO_NS = 16  # from a thread without Python: late only without processor time
    FIRST_STEP = 17  # the first step whose begin is known, plus one; 0: none
    FIRST_STEP_MONO_NS = 18
    # Time that the thread which marks steps has spent from the first step to the newest, or to the
    # end.
    WAITED_NS = 19  # blocked in collectives and messages
    CHECKPOINT_NS = 20
    DATA_NS = 21
    SAVED_STEP = 22  # the step of the last checkpoint that was saved, plus one; 0: none
    NUM_LOADS = 23  # checkpoints loaded
    NUM_WORDS = 24


# One blob is `stamp u64, length u32, crc u32, JSON, stamp u64`; the stamp counts all blobs written.
BLOB_HEAD = np.dtype([("head", "<u8"), ("length", "<u4"), ("crc", "<u4")])

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("major", "<u2"),
        ("minor", "<u2"),
        ("page_bytes", "<u4"),
        ("num_operations", "<u4"),
        ("num_spans", "<u4"),
        ("operation_slot_bytes", "<u4"),
        ("span_slot_bytes", "<u4"),
        ("strings_bytes", "<u4"),
        ("crc", "<u4"),  # of the header up to here
    ]
)

STRING_HEAD = np.dtype([("length", "<u2"), ("crc", "<u4")])  # before each text of the table

FAULT_FRAME = np.dtype([("address", "<u8"), ("offset", "<u8"), ("file", "S104")])
# The signal that ends the process, written by a handler that may do very little: no checksum.
FAULT = np.dtype(
    [
        ("stamp", "<u8"),  # 0: none; 1: without frames; 2: whole
        ("signal", "<u4"),
        ("code", "<i4"),  # si_code
        ("address", "<u8"),
        ("mono_ns", "<i8"),
        ("thread", "<u4"),
        ("num_frames", "<u4"),
        ("reserved", "<u8", 3),
        ("frames", FAULT_FRAME, 24),
    ]
)

# Before each entry of `recent`. `position` counts units since the start, and never 0.
RECENT_HEAD = np.dtype(
    [("position", "<u4"), ("length", "<u4"), ("crc", "<u4"), ("reserved", "<u4")]
)

# A signature is an entry of `recent`: this, then ndims, dims and splits, packed.
SIGNATURE_FIXED = np.dtype(
    [
        ("operation", "<u4"),  # these three point into the string table
        ("dtype", "<u4"),
        ("reduce_op", "<u4"),
        ("num_tensors", "<u2"),
        ("flags", "<u2"),  # SUMMARIZED or 0
    ]
)
MAX_TAIL_BYTES = 2 * 4 + MAX_TENSORS + 8 * MAX_TENSORS * MAX_DIMS + 8 * MAX_SPLITS
MAX_SIGNATURE_BYTES = SIGNATURE_FIXED.itemsize + MAX_TAIL_BYTES

OPERATION_FIXED = np.dtype(
    [
        ("record", "<u8"),  # running number in this process: not comparable between ranks
        ("sequence", "<i8"),  # number among the group's collectives, from 0; -1 for p2p
        ("p2p_sequence", "<i8"),  # number in this group, with this peer and direction; -1
        ("created_mono_ns", "<i8"),
        ("step", "<i8"),  # -1: before the first `step()`
        ("num_bytes", "<i8"),
        ("timeout_ms", "<i8"),
        ("group", "<u4"),  # text
        ("signature", "<u4"),  # entry of `recent`
        ("site", "<u4"),  # text
        ("stack", "<u4"),  # text
        ("root", "<i4"),  # -1: none
        ("peer", "<i4"),  # -1: none
        ("tag", "<i4"),
        ("coalesced", "<i4"),  # number of the coalesced block; -1: none
        ("thread", "<u4"),  # native thread id
        ("flags", "<u4"),
    ]
)

OPERATION_STATE = np.dtype(
    [
        ("head", "<u8"),
        ("started_mono_ns", "<i8"),
        ("completed_mono_ns", "<i8"),  # completed or failed
        ("error", "<u4"),
        ("state", "<u4"),
        ("crc", "<u4"),
        ("reserved", "<u4"),
        ("tail", "<u8"),
    ]
)

# Three cache lines: two that are written once, and one for the state.
OPERATION_SLOT = np.dtype(
    {
        "names": ["head", "length", "crc", "fixed", "tail", "state"],
        "formats": ["<u8", "<u4", "<u4", OPERATION_FIXED, "<u8", OPERATION_STATE],
        "offsets": [0, 8, 12, 16, 120, 128],
        "itemsize": 192,
    }
)

# An operation that has not ended when its slot is reused, with its signature.
KEPT_OPERATION = np.dtype(
    {
        "names": ["slot", "length", "crc", "signature"],
        "formats": [OPERATION_SLOT, "<u4", "<u4", f"V{MAX_SIGNATURE_BYTES}"],
        "offsets": [0, 192, 196, 200],
        "itemsize": 1344,
    }
)

SPAN_FIXED = np.dtype(
    [
        ("number", "<u8"),
        ("started_mono_ns", "<i8"),
        ("ended_mono_ns", "<i8"),  # 0: still open
        ("step", "<i8"),
        ("name", "<u4"),
        ("detail", "<u4"),
        ("site", "<u4"),
        ("thread", "<u4"),
        ("depth", "<u4"),
        ("reserved", "<u4"),
    ]
)

SPAN_SLOT = np.dtype(
    [("head", "<u8"), ("length", "<u4"), ("crc", "<u4"), ("fixed", SPAN_FIXED), ("tail", "<u8")]
)

# ---- what readers return: indices into `Record.strings`, `.groups` and `.signatures` ----

OPERATION = np.dtype(
    [
        ("record", "<u8"),
        ("sequence", "<i8"),
        ("p2p_sequence", "<i8"),
        ("created_mono_ns", "<i8"),
        ("started_mono_ns", "<i8"),
        ("completed_mono_ns", "<i8"),
        ("step", "<i8"),
        ("num_bytes", "<i8"),
        ("timeout_ms", "<i8"),
        ("group", "<u4"),  # into groups
        ("operation", "<u4"),  # into strings
        ("signature", "<u4"),  # into signatures
        ("reduce_op", "<u4"),  # into strings, "" if none
        ("site", "<u4"),  # into strings: "file:line function"
        ("stack", "<u4"),  # into strings: one frame per line, innermost first
        ("error", "<u4"),  # into strings
        ("root", "<i4"),
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("coalesced", "<i4"),
        ("thread", "<u4"),
        ("flags", "<u2"),
        ("state", "u1"),
    ]
)

SPAN = np.dtype(
    [
        ("number", "<u8"),
        ("started_mono_ns", "<i8"),
        ("ended_mono_ns", "<i8"),
        ("step", "<i8"),
        ("name", "<u4"),  # into strings
        ("detail", "<u4"),  # into strings
        ("site", "<u4"),  # into strings
        ("thread", "<u4"),
        ("depth", "<u4"),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The process that wrote a black box, its clock readings, and the recorder's settings.

    `mono_ns` and `wall_ns` are read at the same moment. Adding `clock_offset_ns` to a timestamp of
    this rank converts the timestamp to rank 0's clock. The error of that offset was at most
    `clock_error_ns` when it was measured; -1 means that the offset is unknown.
    """

    rank: int
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0
    job_id: str = ""
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    pid_start_ticks: int = 0
    mono_ns: int = 0
    wall_ns: int = 0
    clock_offset_ns: int = 0
    clock_error_ns: int = -1
    stack_signal: int = 0  # 0: no handler is registered
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def misses_operations(self) -> bool:
        """True if the ring lacks operations because the rank called them on device tensors."""
        return bool(self.settings.get("device_operations"))

    def changed(self, **changes: Any) -> Identity:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name and its members' global ranks, in group order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The dtype, shapes and splits of an operation.

    If the full lists exceed the format's limits, `shapes` and the splits are empty, and `summary`
    contains (number of tensors, number of elements, CRC32 of the full lists).
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    summary: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        """Format the signature, for example as `float32[1024, 4096]`."""
        if self.summary is not None:
            return f"{self.dtype}[{self.summary[0]} tensors, {self.summary[1]} elements]"
        return " ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes) or self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """The uncaught exception that ended a rank or one of its threads."""

    type: str
    message: str
    site: str  # "file:line function" of the innermost frame of the user's own code
    traceback: str
    mono_ns: int
    bases: tuple[str, ...] = ()  # qualified names of the type's base classes
    thread: str = ""  # the thread that it ended, if the process lived on


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The signal that ended a rank, as recorded by the dying process."""

    signal: int
    code: int = 0  # si_code: above 0, the thread's own instruction caused it
    address: int = 0  # the address that it could not access; 0: none
    mono_ns: int = 0
    thread: int = 0
    frames: tuple[str, ...] = ()  # innermost first: "libc.so.6+0x1234", with a function if known


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of one rank's black box.

    `operations` [num_operations] has dtype `OPERATION` and is sorted oldest first. `spans` (ended
    spans) and `open_spans` have dtype `SPAN`. A thread's open spans are sorted outermost first.
    """

    path: str
    identity: Identity
    operations: npt.NDArray[Any]
    spans: npt.NDArray[Any]
    open_spans: npt.NDArray[Any]
    strings: Sequence[str]
    groups: Sequence[Group]
    signatures: Sequence[Signature]
    live: tuple[int, ...] = (0,) * Live.NUM_WORDS
    last_words: LastWords | None = None
    fault: Fault | None = None
    host: HostFacts = field(default_factory=HostFacts)
    dumped_mono_ns: int = 0  # on the rank's own host
    has_ring: bool = True  # False: the rank never opened one; there is only `host`
    warnings: tuple[str, ...] = ()


def encode_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as comma-separated ranges of the form `first-last:stride`."""
    runs: list[str] = []
    i = 0
    while i < len(ranks):
        j = i + 1
        stride = ranks[j] - ranks[i] if j < len(ranks) else 1
        while stride > 0 and j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == stride:
            j += 1
        if stride <= 0 or j >= len(ranks) or j == i + 1:
            runs.append(str(ranks[i]))
            i += 1
            continue
        runs.append(f"{ranks[i]}-{ranks[j]}" + (f":{stride}" if stride > 1 else ""))
        i = j + 1
    return ",".join(runs)


def decode_ranks(text: str, limit: int = MAX_RANKS) -> tuple[int, ...]:
    """Parse the text that `encode_ranks` returned.

    Raises:
        ValueError: the text is malformed or names more than `limit` ranks.
    """
    if not isinstance(text, str):
        raise ValueError("the field 'ranks' must be a string")
    ranks: list[int] = []
    for run in text.split(",") if text else []:
        span, _, stride = run.partition(":")
        first, dash, last = span.partition("-")
        more = range(int(first), int(last if dash else first) + 1, int(stride or 1))
        if len(ranks) + len(more) > limit:
            raise ValueError(f"the groups have more than {MAX_RANKS} ranks in total")
        ranks.extend(more)
    return tuple(ranks)
