"""Turn the bytes of a ring into columns, taking only what checks out.

What is torn (its writer was in the middle of it) or damaged is left out or marked, and counted in
the warnings: see schema.py, [Note: what makes a slot readable].
"""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from echelon.errors import DumpFormatError
from echelon.recorder.format.layout import (
    FAULT_OFFSET,
    IDENTITY_BYTES,
    IDENTITY_OFFSETS,
    LAST_WORDS_BYTES,
    LAST_WORDS_OFFSET,
    LIVE_BYTES,
    LIVE_OFFSET,
    STRINGS_OFFSET,
    Layout,
)
from echelon.recorder.format.schema import (
    BLOB_HEAD,
    FAULT,
    HEADER,
    IS_RECENT,
    KEPT_OPERATION,
    MAX_RANKS,
    MAX_SIGNATURE_BYTES,
    MAX_SLOTS,
    NUM_KEPT,
    OPERATION,
    OPERATION_FIXED,
    OPERATION_SLOT,
    OPERATION_STATE,
    RECENT_BYTES,
    RECENT_UNIT,
    RING_MAGIC,
    SIGNATURE_FIXED,
    SPAN,
    SPAN_SLOT,
    STRINGS_BYTES,
    Fault,
    Flag,
    Group,
    Identity,
    LastWords,
    Live,
    Signature,
    State,
    decode_ranks,
)
from echelon.recorder.read.untrusted import build, check_version

DAMAGED = "<damaged>"
OVERWRITTEN = "<overwritten>"
_U32 = 0xFFFFFFFF
_MAX_SIGNAL = 64
_STRING_HEAD = struct.Struct("<HI")
_RECENT_HEAD = struct.Struct("<IIII")
_SIGNATURE_FIXED = struct.Struct("<IIIHH")
_OPERATION_HEAD = struct.Struct("<QII")
_RECENT_UNITS = RECENT_BYTES // RECENT_UNIT
_MAX_PAYLOAD_BYTES = OPERATION_SLOT.fields["tail"][1] - _OPERATION_HEAD.size  # type: ignore[index]
_COPIED = tuple(
    name
    for name in OPERATION.names or ()
    if name in (OPERATION_FIXED.names or ()) and name not in ("group", "site", "stack", "signature")
)


class _Call(NamedTuple):
    """What a signature says, as indices into `strings` and `signatures`."""

    operation: int
    reduce_op: int
    signature: int
    flags: int


class RingParser:
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
        self._call_index: dict[int, _Call | None] = {}
        self.num_torn = 0
        self._ranks_left = MAX_RANKS
        self._recent_units = live[Live.RECENT_UNITS]
        self._strings_used = min(live[Live.STRINGS_USED_BYTES], STRINGS_BYTES)

    def all_warnings(self) -> list[str]:
        """Return each warning once, with how often it came."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in Counter(self.warnings).items()
        ]

    def operations(self) -> npt.NDArray[Any]:
        """Return the rows of dtype `OPERATION`, oldest first."""
        slots = np.frombuffer(
            self._data, OPERATION_SLOT, self._layout.num_operations, self._layout.operations_offset
        )
        used = np.flatnonzero(slots["head"] | slots["tail"])
        chosen = self._whole(slots, used)
        in_slots, calls = self._rows(slots[chosen])
        out = in_slots[self._with_signature(in_slots["record"], calls)]
        kept = self._kept_operations()
        kept = kept[~np.isin(kept["record"], out["record"])]
        out = np.concatenate([kept, out])
        return out[np.argsort(out["record"], kind="stable")]

    def _rows(self, slots: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[_Call | None]]:
        """Return the rows of slots whose payloads are whole, and what each was called with."""
        fixed, state = slots["fixed"], slots["state"]
        out = np.zeros(len(slots), OPERATION)
        for name in _COPIED:
            out[name] = fixed[name]
        own = self._states_known(slots["head"], state)
        out["state"] = np.where(own, state["state"], State.CREATED)
        for name in ("started_mono_ns", "completed_mono_ns"):
            out[name] = np.where(own, state[name], 0)
        for name in ("site", "stack"):
            out[name] = self._mapped(fixed[name], self._string)
        out["error"] = self._mapped(np.where(own, state["error"], 0), self._string)
        out["group"] = self._mapped(fixed["group"], self._group)
        calls = [self._call(ref) for ref in fixed["signature"].tolist()]
        self._fill_calls(out, calls)
        return out, calls

    def _fill_calls(self, out: npt.NDArray[Any], calls: list[_Call | None]) -> None:
        none = _Call(0, 0, 0, 0)
        columns = np.array([call or none for call in calls], np.uint32).reshape(-1, len(none))
        for i, name in enumerate(("operation", "reduce_op", "signature")):
            out[name] = columns[:, i]
        out["flags"] |= columns[:, 3].astype(np.uint16)

    def _with_signature(
        self, records: npt.NDArray[Any], calls: list[_Call | None]
    ) -> npt.NDArray[Any]:
        """Choose the rows younger than every one whose signature was overwritten.

        What is left ends where the ring would end if it were smaller: no operation is missing in
        the middle.
        """
        lost = np.array([call is None for call in calls], bool)
        if not lost.any():
            return np.ones(len(records), bool)
        younger: npt.NDArray[Any] = records > records[lost].max()
        self.warnings.append(
            f"{len(records) - int(younger.sum())} of the oldest operations were left out: "
            "newer calls took the place of what they were called with"
        )
        return younger

    def _kept_operations(self) -> npt.NDArray[Any]:
        """Return the rows of operations that outlived their slots."""
        places = np.frombuffer(self._data, KEPT_OPERATION, NUM_KEPT, self._layout.kept_offset)
        used = np.flatnonzero(places["slot"]["head"])
        slots = places["slot"][used]
        starts = (self._layout.kept_offset + used * KEPT_OPERATION.itemsize).tolist()
        good = slots["head"] == slots["tail"]
        good &= slots["fixed"]["record"] == slots["head"] - 1
        good &= slots["length"] == OPERATION_FIXED.itemsize
        good &= np.array([is_payload_whole(self._data, at) for at in starts], bool)
        self._note_torn(len(used) - int(good.sum()), "kept operations are damaged")
        out, _ = self._rows(slots[good])
        calls = [self._kept_call(places[i]) for i in used[good].tolist()]
        self._fill_calls(out, calls)
        return out

    def _kept_call(self, place: npt.NDArray[Any]) -> _Call | None:
        length = int(place["length"])
        data = place["signature"].tobytes()[:length]
        # Seeded by its operation's stamp: the place may be taken by another one while it is copied.
        seed = int(place["slot"]["head"]) & _U32
        if length > MAX_SIGNATURE_BYTES or crc32(data, seed) != int(place["crc"]):
            return self._damaged_call("the signature of a kept operation is damaged")
        return self._decoded_call(data) if data else self._new_call(OVERWRITTEN)

    def spans(self, offset: int, capacity: int) -> npt.NDArray[Any]:
        """Return the rows of dtype `SPAN` of the slots at `offset`, in order of their begin."""
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

    def identity(self, path: Path) -> Identity:
        """Return who wrote the ring: the newer of two places.

        Raises:
            DumpFormatError: neither of them is whole.
        """
        found = [_blob(self._data, at, IDENTITY_BYTES) for at in IDENTITY_OFFSETS]
        whole = [one for one in found if one is not None]
        if not whole:
            raise DumpFormatError(f"{path}: the ring's identity is damaged", path=path)
        for at, one in zip(IDENTITY_OFFSETS, found, strict=True):
            if one is None and any(self._data[at : at + BLOB_HEAD.itemsize]):
                self.warnings.append("an identity is damaged: the other one is used")
        return build(path, Identity, max(whole, key=lambda one: one[0])[1])

    def fault(self) -> Fault | None:
        """Return the signal that ended the rank; None if none was written."""
        row = np.frombuffer(self._data, FAULT, 1, FAULT_OFFSET)[0]
        if row["stamp"] not in (1, 2) or not 0 < row["signal"] <= _MAX_SIGNAL:
            return None
        count = min(int(row["num_frames"]), len(row["frames"])) if row["stamp"] == 2 else 0
        return Fault(
            signal=int(row["signal"]),
            code=int(row["code"]),
            address=int(row["address"]),
            mono_ns=int(row["mono_ns"]),
            thread=int(row["thread"]),
            frames=tuple(_frame_text(frame) for frame in row["frames"][:count]),
        )

    def last_words(self, path: Path) -> LastWords | None:
        """Return the rank's last words; damaged ones cost a warning, not the record."""
        found = _blob(self._data, LAST_WORDS_OFFSET, LAST_WORDS_BYTES)
        if found is None:
            if any(self._data[LAST_WORDS_OFFSET : LAST_WORDS_OFFSET + BLOB_HEAD.itemsize]):
                self.warnings.append("the last words are damaged")
            return None
        try:
            return build(path, LastWords, found[1])
        except DumpFormatError:
            self.warnings.append("the last words are damaged")
            return None

    def _whole(self, slots: npt.NDArray[Any], used: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Choose the slots whose payload is all there: [Note: what makes a slot readable]."""
        head, length = slots["head"][used], slots["length"][used]
        good = (head == slots["tail"][used]) & (slots["fixed"]["record"][used] == head - 1)
        good &= (head - 1) % self._layout.num_operations == used
        good &= length == OPERATION_FIXED.itemsize
        chosen: npt.NDArray[Any] = used[good]
        starts = self._layout.operations_offset + chosen * OPERATION_SLOT.itemsize
        data = self._data
        whole = [is_payload_whole(data, at) for at in starts.tolist()]
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
        if ref & IS_RECENT:
            return self._recent_text(ref - IS_RECENT)
        at = STRINGS_OFFSET + ref
        begin = at + _STRING_HEAD.size
        if ref + _STRING_HEAD.size <= self._strings_used:
            length, crc = _STRING_HEAD.unpack_from(self._data, at)
            data = self._data[begin : begin + length]
            if begin + length - STRINGS_OFFSET <= self._strings_used and crc32(data) == crc:
                return data.decode("utf-8", "replace")
        self.num_torn += 1  # or younger than the copy of the texts, which precede the slots
        self.warnings.append("a text is damaged")
        return DAMAGED

    def _recent_text(self, ref: int) -> str:
        data = self._recent(ref)
        if data is not None:
            return data.decode("utf-8", "replace")
        if self._is_overwritten(ref):
            return OVERWRITTEN
        self.num_torn += 1
        self.warnings.append("a text is damaged")
        return DAMAGED

    def _recent(self, ref: int) -> bytes | None:
        """Return an entry of `recent`; None if it was overwritten or is damaged."""
        at = self._layout.recent_offset + ref % _RECENT_UNITS * RECENT_UNIT
        position, length, crc, _ = _RECENT_HEAD.unpack_from(self._data, at)
        begin = at + _RECENT_HEAD.size
        if ref == 0 or position != ref or begin + length > self._layout.file_bytes:
            return None
        data = self._data[begin : begin + length]
        return data if crc32(data, ref) == crc else None

    def _is_overwritten(self, ref: int) -> bool:
        return ref != 0 and (self._recent_units - ref) % IS_RECENT > _RECENT_UNITS

    def _group(self, ref: int) -> int:
        known = self._group_index.get(ref)
        if known is not None:
            return known
        name, _, ranks = self._text(ref).rpartition("\n")
        try:
            group = Group(name, decode_ranks(ranks, self._ranks_left))
            self._ranks_left -= len(group.ranks)
        except ValueError:
            # Its reference tells it from other groups that cannot be read: they are never one.
            group = Group(name or f"{DAMAGED} {ref}", ())
            self.warnings.append("the members of a group cannot be read")
        self.groups.append(group)
        self._group_index[ref] = len(self.groups) - 1
        return len(self.groups) - 1

    def _call(self, ref: int) -> _Call | None:
        """Return what an operation was called with; None if that was overwritten."""
        if ref in self._call_index:
            return self._call_index[ref]
        data, call = self._recent(ref), None
        if data is not None:
            call = self._decoded_call(data)
        elif not self._is_overwritten(ref):
            self.num_torn += 1
            call = self._damaged_call("a signature is damaged")
        self._call_index[ref] = call
        return call

    def _decoded_call(self, data: bytes) -> _Call:
        try:
            operation, dtype, reduce_op, num_tensors, flags = _SIGNATURE_FIXED.unpack_from(data)
            signature = decode_signature(
                self._text(dtype),
                num_tensors,
                bool(flags & Flag.SUMMARISED),
                data[SIGNATURE_FIXED.itemsize :],
            )
        except (ValueError, struct.error):
            return self._damaged_call("a signature cannot be read")
        self.signatures.append(signature)
        return _Call(
            self._string(operation),
            self._string(reduce_op),
            len(self.signatures) - 1,
            flags & Flag.SUMMARISED,
        )

    def _damaged_call(self, warning: str) -> _Call:
        self.warnings.append(warning)
        return self._new_call(DAMAGED)

    def _new_call(self, text: str) -> _Call:
        self.signatures.append(Signature(text))
        self.strings.append(text)
        return _Call(len(self.strings) - 1, 0, len(self.signatures) - 1, 0)


def _frame_text(frame: npt.NDArray[Any]) -> str:
    file = bytes(frame["file"]).decode("utf-8", "replace")
    return f"{file}+{int(frame['offset']):#x}" if file else f"{int(frame['address']):#x}"


def is_payload_whole(data: bytes, at: int) -> bool:
    """Check the CRC of the operation slot that begins at `at`."""
    _, length, crc = _OPERATION_HEAD.unpack_from(data, at)
    begin = at + _OPERATION_HEAD.size
    return bool(length <= _MAX_PAYLOAD_BYTES and crc32(data[begin : begin + length]) == crc)


def decode_signature(dtype: str, num_tensors: int, summarised: bool, tail: bytes) -> Signature:
    """Read the tail of a signature, as `operations.encode_signature` writes it.

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


def check_header(path: Path, data: bytes | mmap.mmap, file_bytes: int = -1) -> Layout:
    """Return where the parts of a ring lie.

    Args:
        data: the file, or its first pages.
        file_bytes: the file's size; -1: that of `data`.

    Raises:
        DumpFormatError: no ring, another major version, or shorter than the header says.
    """
    if len(data) < LIVE_OFFSET + LIVE_BYTES or data[: len(RING_MAGIC)] != RING_MAGIC:
        raise DumpFormatError(f"{path}: not an echelon ring", path=path)
    header = np.frombuffer(data, HEADER, 1)[0]
    check_version(path, [int(header["major"]), int(header["minor"])])
    body = data[: HEADER.itemsize - header["crc"].itemsize]
    layout = Layout(int(header["num_operations"]), int(header["num_spans"]))
    if (
        not 0 < layout.num_operations <= MAX_SLOTS
        or not 0 < layout.num_spans <= MAX_SLOTS
        or int(header["crc"]) != crc32(body)
        or int(header["operation_slot_bytes"]) != OPERATION_SLOT.itemsize
        or int(header["span_slot_bytes"]) != SPAN_SLOT.itemsize
    ):
        raise DumpFormatError(f"{path}: the ring's header is damaged", path=path)
    size = len(data) if file_bytes < 0 else file_bytes
    if size < layout.file_bytes:
        raise DumpFormatError(
            f"{path}: {size} B, the header says {layout.file_bytes} B: truncated", path=path
        )
    return layout


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
