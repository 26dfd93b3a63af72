"""Read black boxes: live rings, rings of dead processes, and dump files.

Read-only and safe on untrusted bytes: counts are bounded by the file's size before anything is
allocated, nothing is evaluated, and what does not check out is left out and counted in
`Record.warnings`. A file that is no black box at all is a `DumpFormatError`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgpack
import numpy as np
import numpy.typing as npt

from echelon.errors import DumpFormatError
from echelon.recorder.layout import (
    IDENTITY_BYTES,
    IDENTITY_OFFSETS,
    LAST_WORDS_BYTES,
    LAST_WORDS_OFFSET,
    LIVE_BYTES,
    LIVE_OFFSET,
    OPEN_SPANS_OFFSET,
    STRINGS_OFFSET,
    Layout,
)
from echelon.recorder.schema import (
    BLOB_HEAD,
    DUMP_CRC_MARK,
    DUMP_KIND,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    HEADER,
    NUM_OPEN_SPANS,
    OPERATION,
    OPERATION_FIXED,
    OPERATION_SLOT,
    OPERATION_STATE,
    RING_MAGIC,
    SPAN,
    SPAN_SLOT,
    STRINGS_BYTES,
    TAIL_BYTES,
    Flag,
    Group,
    HostFacts,
    Identity,
    LastWords,
    Live,
    Record,
    Signature,
    Socket,
    State,
    decode_ranks,
)
from echelon.recorder.watchdog import Sight

_T = TypeVar("_T")
_MAX_CAPACITY = 1 << 22
_MAX_DUMP_BYTES = 1 << 30
_U32 = 0xFFFFFFFF
DAMAGED = "<damaged>"
_STRING_HEAD = struct.Struct("<HI")
_OPERATION_HEAD = struct.Struct("<QII")
_MAX_PAYLOAD_BYTES = OPERATION_FIXED.itemsize + TAIL_BYTES
_COPIED = tuple(
    name
    for name in OPERATION.names or ()
    if name in (OPERATION_FIXED.names or ())
    and name not in ("group", "operation", "reduce_op", "site", "stack")
)


def read(path: Path) -> Record:
    """Read a ring or a dump, told apart by its first bytes.

    Raises:
        DumpFormatError: the file is neither, is too new, or cannot be opened.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(RING_MAGIC))
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    return read_ring(path) if magic == RING_MAGIC else read_dump(path)


def read_ring(path: Path) -> Record:
    """Read a ring file, also while its process writes it.

    Raises:
        DumpFormatError: no ring, a newer major version, or shorter than its header says.
    """
    for last_try in (False, False, True):
        record, num_torn = _read_ring_once(path)
        if not num_torn or last_try:
            break  # a dead writer's torn slot stays torn; a living one's is whole a moment later
    return record


def _read_ring_once(path: Path) -> tuple[Record, int]:
    """Read a ring from one copy of its bytes; return how many slots were torn, too."""
    try:
        data = path.read_bytes()
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    layout = _check_header(path, data)
    identities = [_blob(data, at, IDENTITY_BYTES) for at in IDENTITY_OFFSETS]
    if not any(identities):
        raise DumpFormatError(f"{path}: the ring's identity is damaged", path=path)
    _, identity_fields = max(filter(None, identities), key=lambda found: found[0])
    live = tuple(np.frombuffer(data, "<u8", Live.NUM_WORDS, LIVE_OFFSET).tolist())
    parser = _RingParser(data, layout, live)
    if any(
        found is None and any(data[at : at + BLOB_HEAD.itemsize])
        for at, found in zip(IDENTITY_OFFSETS, identities, strict=True)
    ):
        parser.warnings.append("an identity is damaged: the other one is used")
    operations = parser.operations()
    spans = parser.spans(layout.spans_offset, layout.num_spans)
    open_spans = parser.spans(OPEN_SPANS_OFFSET, NUM_OPEN_SPANS)
    record = Record(
        path=str(path),
        identity=_dataclass(path, Identity, identity_fields),
        operations=operations,
        spans=spans[spans["ended_mono_ns"] > 0],
        open_spans=open_spans[open_spans["ended_mono_ns"] == 0],
        strings=parser.strings,
        groups=parser.groups,
        signatures=parser.signatures,
        live=live,
        last_words=parser.last_words(path),
        warnings=tuple(parser.all_warnings()),
    )
    return record, parser.num_torn


def read_dump(path: Path) -> Record:
    """Read a dump file, as `dump.write_dump` makes it.

    Raises:
        DumpFormatError: no dump, damaged, or of a newer major version.
    """
    try:
        if path.stat().st_size > _MAX_DUMP_BYTES:
            raise DumpFormatError(f"{path}: larger than any dump ({_MAX_DUMP_BYTES} B)", path=path)
        data = path.read_bytes()
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    has_crc = data[-len(DUMP_CRC_MARK) - 4 : -4] == DUMP_CRC_MARK
    if has_crc and crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DumpFormatError(f"{path}: damaged dump (its checksum differs)", path=path)
    try:
        top = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as err:
        raise DumpFormatError(f"{path}: not an echelon ring or dump", path=path) from err
    if not isinstance(top, dict) or top.get("kind") != DUMP_KIND:
        raise DumpFormatError(f"{path}: not an echelon ring or dump", path=path)
    version = _check_version(path, top.get("version"))
    if version >= (1, 1) and not has_crc:
        raise DumpFormatError(f"{path}: damaged dump (it has no checksum)", path=path)
    try:
        return _record_of_dump(path, top)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as err:
        raise DumpFormatError(f"{path}: damaged dump ({err!r})", path=path) from err


class LiveRing:
    """A ring mapped read-only, to look at again and again while its process runs.

    Raises:
        DumpFormatError: the file is not there, or no whole ring yet.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as err:  # ValueError: still empty
            raise DumpFormatError(f"{path}: {err}", path=path) from err
        try:
            layout = _check_header(path, self._map)
        except DumpFormatError:
            self._map.close()
            raise
        self._live = np.frombuffer(self._map, "<u8", Live.NUM_WORDS, LIVE_OFFSET)
        self._slots = np.frombuffer(
            self._map, OPERATION_SLOT, layout.num_operations, layout.operations_offset
        )

    def words(self) -> tuple[int, ...]:
        """Return the live words, see `Live`."""
        return tuple(int(word) for word in self._live)

    def pending(self) -> tuple[int, int]:
        """Return (when the oldest operation that has not ended was called, how many there are)."""
        state, head = self._slots["state"], self._slots["head"]
        ended = (state["head"] == head) & (state["state"] >= State.COMPLETED)
        open_slots = np.flatnonzero((head != 0) & (self._slots["tail"] == head) & ~ended)
        called = self._slots["fixed"]["created_mono_ns"][open_slots]
        # The oldest decides about a stall: it must not be a slot that is just being written.
        for i in np.argsort(called, kind="stable").tolist():
            copy = self._slots[open_slots[i] : open_slots[i] + 1].copy()
            if _is_payload_whole(copy.tobytes(), 0):
                return int(copy["fixed"]["created_mono_ns"][0]), len(open_slots)
        return 0, 0

    def sight(self, rank: int) -> Sight:
        """Return what the stall rule wants to know of this rank."""
        words = self.words()
        pending_mono_ns, num_pending = self.pending()
        ended = words[Live.NUM_OPERATIONS] - num_pending + words[Live.NUM_SPANS] + words[Live.STEP]
        return Sight(
            rank=rank,
            initialised=bool(words[Live.INITIALISED]),
            progress_mono_ns=words[Live.PROGRESS_MONO_NS],
            pending_mono_ns=pending_mono_ns,
            num_ended=ended,
        )

    def activity(self) -> int:
        """Count what the rank has begun or ended so far: if it stands still, so does the rank."""
        return self.words()[Live.NUM_OPERATIONS] + self.sight(0).num_ended

    def close(self) -> None:
        """Unmap the file."""
        del self._live, self._slots
        self._map.close()


class _RingParser:
    """Turn the bytes of a ring into columns; strings and signatures are read once each."""

    def __init__(self, data: bytes, layout: Layout, live: tuple[int, ...]) -> None:
        self._data = data
        self._layout = layout
        self.warnings: list[str] = []
        self.strings: list[str] = [""]
        self.groups: list[Group] = []
        self.signatures: list[Signature] = []
        self._string_index: dict[int, int] = {0: 0}
        self._group_index: dict[int, int] = {}
        self._signature_index: dict[tuple[int, int, int, bytes], int] = {}
        self.num_torn = 0
        self._strings_used = min(live[Live.STRINGS_USED_BYTES], STRINGS_BYTES)

    def all_warnings(self) -> list[str]:
        """Return each warning once, with how often it came."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in Counter(self.warnings).items()
        ]

    def operations(self) -> npt.NDArray[Any]:
        slots = np.frombuffer(
            self._data, OPERATION_SLOT, self._layout.num_operations, self._layout.operations_offset
        )
        used = np.flatnonzero(slots["head"] | slots["tail"])
        chosen = self._whole(slots, used)
        fixed, state = slots["fixed"][chosen], slots["state"][chosen]
        out = np.zeros(len(chosen), OPERATION)
        for name in _COPIED:
            out[name] = fixed[name]
        own = self._states_known(slots["head"][chosen], state)
        out["state"] = np.where(own, state["state"], State.CREATED)
        for name in ("started_mono_ns", "completed_mono_ns"):
            out[name] = np.where(own, state[name], 0)
        for name in ("operation", "reduce_op", "site", "stack"):
            out[name] = self._mapped(fixed[name], self._string)
        out["error"] = self._mapped(np.where(own, state["error"], 0), self._string)
        out["group"] = self._mapped(fixed["group"], self._group)
        out["signature"] = self._signatures_of(fixed, chosen, slots["length"][chosen])
        return out[np.argsort(out["record"], kind="stable")]

    def spans(self, offset: int, capacity: int) -> npt.NDArray[Any]:
        slots = np.frombuffer(self._data, SPAN_SLOT, capacity, offset)
        used = np.flatnonzero(slots["head"] | slots["tail"])
        data, begin, end = self._data, SPAN_SLOT.fields["fixed"][1], SPAN_SLOT.fields["tail"][1]  # type: ignore[index]
        starts = (offset + used * SPAN_SLOT.itemsize).tolist()
        crcs = np.array([crc32(data[at + begin : at + end]) for at in starts], np.uint32)
        good = (slots["head"][used] == slots["tail"][used]) & (slots["crc"][used] == crcs)
        self._note_torn(len(used) - int(good.sum()), "spans were being written or are damaged")
        fixed = slots["fixed"][used[good]]
        out = np.zeros(len(fixed), SPAN)
        for name in ("number", "started_mono_ns", "ended_mono_ns", "step", "thread", "depth"):
            out[name] = fixed[name]
        for name in ("name", "detail", "site"):
            out[name] = self._mapped(fixed[name], self._string)
        return out[np.lexsort((out["depth"], out["number"]))]

    def last_words(self, path: Path) -> LastWords | None:
        """Return the rank's last words; damaged ones cost a warning, not the record."""
        found = _blob(self._data, LAST_WORDS_OFFSET, LAST_WORDS_BYTES)
        if found is None:
            if any(self._data[LAST_WORDS_OFFSET : LAST_WORDS_OFFSET + BLOB_HEAD.itemsize]):
                self.warnings.append("the last words are damaged")
            return None
        try:
            return _dataclass(path, LastWords, found[1])
        except DumpFormatError:
            self.warnings.append("the last words are damaged")
            return None

    def _whole(self, slots: npt.NDArray[Any], used: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Choose the slots whose payload is all there: [Note: what makes a slot readable]."""
        head, length = slots["head"][used], slots["length"][used]
        good = (head == slots["tail"][used]) & (slots["fixed"]["record"][used] == head - 1)
        good &= (head - 1) % self._layout.num_operations == used
        good &= (length >= OPERATION_FIXED.itemsize) & (length <= _MAX_PAYLOAD_BYTES)
        chosen: npt.NDArray[Any] = used[good]
        starts = self._layout.operations_offset + chosen * OPERATION_SLOT.itemsize
        data = self._data
        whole = [_is_payload_whole(data, at) for at in starts.tolist()]
        chosen = chosen[np.array(whole, bool)]
        self._note_torn(len(used) - len(chosen), "operations were being written or are damaged")
        return chosen

    def _states_known(self, head: npt.NDArray[Any], state: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Tell which state cells are about their slot's operation, and whole.

        A cell that still tells of an earlier use of its slot, or of none, is whole, too: the
        operation has been created and not more.
        """
        stamp = state["head"]
        raw, size = state.tobytes(), OPERATION_STATE.itemsize
        seeds = (stamp & _U32).tolist()
        crcs = [crc32(raw[i * size + 8 : i * size + 32], seed) for i, seed in enumerate(seeds)]
        good = (state["tail"] == stamp) & (state["crc"] == np.array(crcs, np.uint32))
        good &= (state["state"] >= State.STARTED) & (state["state"] <= State.FAILED)
        good &= (stamp <= head) & ((head - stamp) % self._layout.num_operations == 0)
        unused = np.frombuffer(raw, np.uint8).reshape(len(state), size).max(axis=1, initial=0) == 0
        self._note_torn(
            int((~good & ~unused).sum()),
            "states were being written or are damaged: shown as created",
        )
        known: npt.NDArray[Any] = good & (stamp == head)
        return known

    def _note_torn(self, count: int, what: str) -> None:
        if count:
            self.num_torn += count
            self.warnings.append(f"{count} {what}")

    def _mapped(self, refs: npt.NDArray[Any], one: Callable[[int], int]) -> npt.NDArray[Any]:
        unique, inverse = np.unique(refs, return_inverse=True)
        return np.array([one(int(ref)) for ref in unique], np.uint32)[inverse]

    def _string(self, ref: int) -> int:
        known = self._string_index.get(ref)
        if known is not None:
            return known
        self.strings.append(self._text(ref))
        self._string_index[ref] = len(self.strings) - 1
        return len(self.strings) - 1

    def _text(self, ref: int) -> str:
        at = STRINGS_OFFSET + ref
        begin = at + _STRING_HEAD.size
        if ref + _STRING_HEAD.size <= self._strings_used:
            length, crc = _STRING_HEAD.unpack_from(self._data, at)
            data = self._data[begin : begin + length]
            if begin + length - STRINGS_OFFSET <= self._strings_used and crc32(data) == crc:
                return data.decode("utf-8", "replace")
        self.warnings.append("a text is damaged")
        return DAMAGED

    def _group(self, ref: int) -> int:
        known = self._group_index.get(ref)
        if known is not None:
            return known
        name, _, ranks = self._text(ref).rpartition("\n")
        try:
            group = Group(name, decode_ranks(ranks))
        except ValueError:
            group = Group(name or DAMAGED, ())
            self.warnings.append("the members of a group cannot be read")
        self.groups.append(group)
        self._group_index[ref] = len(self.groups) - 1
        return len(self.groups) - 1

    def _signatures_of(
        self, fixed: npt.NDArray[Any], chosen: npt.NDArray[Any], length: npt.NDArray[Any]
    ) -> list[int]:
        starts = self._layout.operations_offset + chosen * OPERATION_SLOT.itemsize
        begins = starts + _OPERATION_HEAD.size + OPERATION_FIXED.itemsize
        ends = starts + _OPERATION_HEAD.size + length
        data = self._data
        keys = zip(
            fixed["dtype"].tolist(),
            (fixed["flags"] & Flag.SUMMARISED).tolist(),
            fixed["num_tensors"].tolist(),
            [data[at:end] for at, end in zip(begins.tolist(), ends.tolist(), strict=True)],
            strict=True,
        )
        known = self._signature_index
        return [known[key] if key in known else self._add_signature(key) for key in keys]

    def _add_signature(self, key: tuple[int, int, int, bytes]) -> int:
        dtype = self._text(key[0])
        try:
            signature = decode_signature(dtype, key[2], bool(key[1]), key[3])
        except ValueError:
            signature = Signature(dtype)
            self.warnings.append("a signature cannot be read")
        self.signatures.append(signature)
        self._signature_index[key] = len(self.signatures) - 1
        return len(self.signatures) - 1


def _is_payload_whole(data: bytes, at: int) -> bool:
    """Check the CRC of the operation slot that begins at `at`."""
    _, length, crc = _OPERATION_HEAD.unpack_from(data, at)
    begin = at + _OPERATION_HEAD.size
    return bool(length <= _MAX_PAYLOAD_BYTES and crc32(data[begin : begin + length]) == crc)


def decode_signature(dtype: str, num_tensors: int, summarised: bool, tail: bytes) -> Signature:
    """Read the tail of an operation's payload, as `recorder.encode_signature` writes it.

    Raises:
        ValueError: the lengths in it do not fit the bytes.
    """
    if len(tail) < 8:
        raise ValueError("too short")
    num_inputs, num_outputs = (int(v) for v in np.frombuffer(tail, "<u4", 2))
    if summarised:
        count, numel, crc = (int(v) for v in np.frombuffer(tail, "<i8", 3, 8))
        return Signature(dtype, summary=(count, numel, crc))
    ndims = list(tail[8 : 8 + num_tensors])
    numbers = np.frombuffer(tail, "<i8", -1, 8 + num_tensors).tolist()
    if len(ndims) != num_tensors or len(numbers) != sum(ndims) + num_inputs + num_outputs:
        raise ValueError("lengths do not fit")
    shapes, at = [], 0
    for ndim in ndims:
        shapes.append(tuple(numbers[at : at + ndim]))
        at += ndim
    inputs = tuple(numbers[at : at + num_inputs])
    return Signature(dtype, tuple(shapes), inputs, tuple(numbers[at + num_inputs :]))


def _check_header(path: Path, data: bytes | mmap.mmap) -> Layout:
    if len(data) < LIVE_OFFSET + LIVE_BYTES or data[: len(RING_MAGIC)] != RING_MAGIC:
        raise DumpFormatError(f"{path}: not an echelon ring", path=path)
    header = np.frombuffer(data, HEADER, 1)[0]
    _check_version(path, [int(header["major"]), int(header["minor"])])
    body = data[: HEADER.itemsize - header["crc"].itemsize]
    layout = Layout(int(header["num_operations"]), int(header["num_spans"]))
    if (
        not 0 < layout.num_operations <= _MAX_CAPACITY
        or not 0 < layout.num_spans <= _MAX_CAPACITY
        or int(header["crc"]) != crc32(body)
        or int(header["operation_slot_bytes"]) != OPERATION_SLOT.itemsize
        or int(header["span_slot_bytes"]) != SPAN_SLOT.itemsize
    ):
        raise DumpFormatError(f"{path}: the ring's header is damaged", path=path)
    if len(data) < layout.file_bytes:
        raise DumpFormatError(
            f"{path}: {len(data)} B, the header says {layout.file_bytes} B: truncated", path=path
        )
    return layout


def _check_version(path: Path, version: object) -> tuple[int, int]:
    if (
        not isinstance(version, Sequence)
        or len(version) != 2
        or not all(isinstance(v, int) for v in version)
    ):
        raise DumpFormatError(f"{path}: no format version", path=path)
    if version[0] != FORMAT_MAJOR:
        raise DumpFormatError(
            f"{path}: format {version[0]}.{version[1]}, this fr-analyze reads "
            f"{FORMAT_MAJOR}.x (written by {FORMAT_MAJOR}.{FORMAT_MINOR}). Upgrade it",
            path=path,
        )
    return version[0], version[1]


def _blob(data: bytes, at: int, room: int) -> tuple[int, dict[str, Any]] | None:
    """Read a blob as (stamp, value); None if never written, being written, or damaged."""
    head = np.frombuffer(data, BLOB_HEAD, 1, at)[0]
    stamp, length = int(head["head"]), int(head["length"])
    tail = int.from_bytes(data[at + room - 8 : at + room], "little")
    begin = at + BLOB_HEAD.itemsize
    if stamp == 0 or stamp != tail or length > room - BLOB_HEAD.itemsize - 8:
        return None
    body = data[begin : begin + length]
    if crc32(body) != int(head["crc"]):
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return (stamp, value) if isinstance(value, dict) else None


def _dataclass(path: Path, kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Build a record class from untrusted fields: unknown ones are dropped, types are checked."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    taken = {name: value for name, value in values.items() if name in known}
    for name, value in taken.items():
        if not _fits(str(known[name].type), value):
            raise DumpFormatError(f"{path}: field {name!r} is {value!r}", path=path)
        if isinstance(value, (list, tuple)):
            of_sockets = str(known[name].type).startswith("tuple[Socket")
            taken[name] = tuple(_dataclass(path, Socket, v) if of_sockets else v for v in value)
    try:
        return kind(**taken)
    except TypeError as err:
        raise DumpFormatError(f"{path}: {kind.__name__} is incomplete", path=path) from err


def _fits(annotation: str, value: object) -> bool:
    plain: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "str": (str,),
        "bool": (bool,),
        "float": (int, float),
    }
    base, _, optional = annotation.partition(" | ")
    if value is None:
        return optional == "None"
    if base in plain:
        return isinstance(value, plain[base]) and (base == "bool" or not isinstance(value, bool))
    if base.startswith("tuple["):
        kind = dict if base.startswith("tuple[Socket") else str
        return isinstance(value, (list, tuple)) and all(isinstance(v, kind) for v in value)
    if base == "Mapping[str, float]":
        return isinstance(value, dict) and all(_fits("float", v) for v in value.values())
    return isinstance(value, dict)


def _record_of_dump(path: Path, top: dict[str, Any]) -> Record:
    strings = [str(text) for text in top["strings"]] or [""]
    groups = [Group(str(name), decode_ranks(ranks)) for name, ranks in top["groups"]]
    signatures = [_signature_of(entry) for entry in top["signatures"]]
    operations = _columns(OPERATION, top["operations"])
    spans = _columns(SPAN, top["spans"])
    open_spans = _columns(SPAN, top["open_spans"])
    _check_indices(operations, "group", len(groups))
    _check_indices(operations, "signature", len(signatures))
    for name in ("operation", "reduce_op", "site", "stack", "error"):
        _check_indices(operations, name, len(strings))
    for name in ("name", "detail", "site"):
        _check_indices(spans, name, len(strings))
        _check_indices(open_spans, name, len(strings))
    live = [int(v) for v in top["live"]][: Live.NUM_WORDS]
    words = top.get("last_words")
    return Record(
        path=str(path),
        identity=_dataclass(path, Identity, top["identity"]),
        operations=operations,
        spans=spans,
        open_spans=open_spans,
        strings=strings,
        groups=groups,
        signatures=signatures,
        live=tuple(live + [0] * (Live.NUM_WORDS - len(live))),
        last_words=None if words is None else _dataclass(path, LastWords, words),
        host=_dataclass(path, HostFacts, top["host"]),
        dumped_mono_ns=int(top["dumped_mono_ns"]),
        has_ring=bool(top["has_ring"]),
        warnings=tuple(str(text) for text in top["warnings"]),
    )


def _signature_of(entry: Sequence[Any]) -> Signature:
    dtype, shapes, inputs, outputs, summary = entry
    return Signature(
        str(dtype),
        tuple(tuple(int(n) for n in shape) for shape in shapes),
        tuple(int(n) for n in inputs),
        tuple(int(n) for n in outputs),
        None if summary is None else (int(summary[0]), int(summary[1]), int(summary[2])),
    )


def _columns(dtype: np.dtype[Any], table: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Read a table of columns; ones that this version does not know are skipped."""
    length = int(table["length"])
    columns: Mapping[str, bytes] = table["columns"]
    names = [name for name in dtype.names or () if name in columns]
    if any(len(columns[name]) != length * dtype[name].itemsize for name in names):
        raise ValueError("a column's length differs from the table's")
    if not names and length:
        raise ValueError("a table without columns")
    out = np.zeros(length, dtype)
    for name in names:
        out[name] = np.frombuffer(columns[name], dtype[name])
    return out


def _check_indices(table: npt.NDArray[Any], column: str, limit: int) -> None:
    if len(table) and int(table[column].max()) >= limit:
        raise ValueError(f"column {column!r} points outside its table")
