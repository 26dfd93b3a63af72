"""Parse the bytes of a ring into columns of checked data.

Incomplete and damaged slots are counted in the warnings (see schema.py, [Note: what makes a slot
readable]).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import (
    KEPT_OPERATION,
    MAX_SIGNATURE_BYTES,
    NUM_KEPT,
    OPERATION,
    OPERATION_FIXED,
    OPERATION_SLOT,
    OPERATION_STATE,
    SPAN,
    SPAN_SLOT,
    State,
)
from echelon.recorder.read.damage import Damage
from echelon.recorder.read.ring_calls import Call, RingCalls
from echelon.recorder.read.ring_texts import RingTexts

_U32 = 0xFFFFFFFF
_OPERATION_HEAD = struct.Struct("<QII")
_MAX_PAYLOAD_BYTES = OPERATION_SLOT.fields["tail"][1] - _OPERATION_HEAD.size  # type: ignore[index]
_COPIED = tuple(
    name
    for name in OPERATION.names or ()
    if name in (OPERATION_FIXED.names or ()) and name not in ("group", "site", "stack", "signature")
)


class RingParser:
    """A parser for the operations and spans in a ring."""

    def __init__(
        self, data: bytes, layout: Layout, texts: RingTexts, calls: RingCalls, damage: Damage
    ) -> None:
        self._data = data
        self._layout = layout
        self._damage = damage
        self._texts = texts
        self._calls = calls

    def operations(self) -> npt.NDArray[Any]:
        """Return the operations as rows of dtype `OPERATION`, oldest first."""
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

    def _rows(self, slots: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Call | None]]:
        """Convert intact slots to rows; also return each row's signature (None if overwritten)."""
        fixed, state = slots["fixed"], slots["state"]
        out = np.zeros(len(slots), OPERATION)
        for name in _COPIED:
            out[name] = fixed[name]
        own = self._states_known(slots["head"], state)
        out["state"] = np.where(own, state["state"], State.CREATED)
        for name in ("started_mono_ns", "completed_mono_ns"):
            out[name] = np.where(own, state[name], 0)
        for name in ("site", "stack"):
            out[name] = self._mapped(fixed[name], self._texts.string)
        out["error"] = self._mapped(np.where(own, state["error"], 0), self._texts.string)
        out["group"] = self._mapped(fixed["group"], self._texts.group)
        calls = [self._calls.call(ref) for ref in fixed["signature"].tolist()]
        self._fill_calls(out, calls)
        return out, calls

    def _fill_calls(self, out: npt.NDArray[Any], calls: list[Call | None]) -> None:
        none = Call(0, 0, 0, 0)
        columns = np.array([call or none for call in calls], np.uint32).reshape(-1, len(none))
        for i, name in enumerate(("operation", "reduce_op", "signature")):
            out[name] = columns[:, i]
        out["flags"] |= columns[:, 3].astype(np.uint16)

    def _with_signature(
        self, records: npt.NDArray[Any], calls: list[Call | None]
    ) -> npt.NDArray[Any]:
        """Return a mask of the rows that are newer than every row with an overwritten signature."""
        lost = np.array([call is None for call in calls], bool)
        if not lost.any():
            return np.ones(len(records), bool)
        younger: npt.NDArray[Any] = records > records[lost].max()
        self._damage.warn(
            f"{len(records) - int(younger.sum())} of the oldest operations were left out: "
            "newer calls overwrote their arguments"
        )
        return younger

    def _kept_operations(self) -> npt.NDArray[Any]:
        """Return the rows of pending operations that were retained when their slots were reused."""
        places = np.frombuffer(self._data, KEPT_OPERATION, NUM_KEPT, self._layout.kept_offset)
        used = np.flatnonzero(places["slot"]["head"])
        slots = places["slot"][used]
        starts = (self._layout.kept_offset + used * KEPT_OPERATION.itemsize).tolist()
        good = slots["head"] == slots["tail"]
        good &= slots["fixed"]["record"] == slots["head"] - 1
        good &= slots["length"] == OPERATION_FIXED.itemsize
        good &= np.array([is_payload_whole(self._data, at) for at in starts], bool)
        self._damage.note_torn(len(used) - int(good.sum()), "kept operations are damaged")
        out, _ = self._rows(slots[good])
        calls = [self._kept_call(places[i]) for i in used[good].tolist()]
        self._fill_calls(out, calls)
        return out

    def _kept_call(self, place: npt.NDArray[Any]) -> Call | None:
        length = int(place["length"])
        data = place["signature"].tobytes()[:length]
        # Seeded by its operation's stamp: another operation may take the place while it is copied.
        seed = int(place["slot"]["head"]) & _U32
        if length > MAX_SIGNATURE_BYTES or crc32(data, seed) != int(place["crc"]):
            return self._calls.damaged("the signature of a kept operation is damaged")
        return self._calls.decoded(data) if data else self._calls.overwritten()

    def spans(self, offset: int, capacity: int) -> npt.NDArray[Any]:
        """Return the spans in the slots at `offset`, sorted by number, with dtype `SPAN`."""
        slots = np.frombuffer(self._data, SPAN_SLOT, capacity, offset)
        used = np.flatnonzero(slots["head"] | slots["tail"])
        data, begin, end = self._data, SPAN_SLOT.fields["fixed"][1], SPAN_SLOT.fields["tail"][1]  # type: ignore[index]
        starts = (offset + used * SPAN_SLOT.itemsize).tolist()
        crcs = np.array([crc32(data[at + begin : at + end]) for at in starts], np.uint32)
        good = (slots["head"][used] == slots["tail"][used]) & (slots["crc"][used] == crcs)
        self._damage.note_torn(
            len(used) - int(good.sum()), "spans were being written or are damaged"
        )
        fixed = slots["fixed"][used[good]]
        out = np.zeros(len(fixed), SPAN)
        for name in ("number", "started_mono_ns", "ended_mono_ns", "step", "thread", "depth"):
            out[name] = fixed[name]
        for name in ("name", "detail", "site"):
            out[name] = self._mapped(fixed[name], self._texts.string)
        return out[np.lexsort((out["depth"], out["number"]))]

    def _whole(self, slots: npt.NDArray[Any], used: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the indices of intact slots; see [Note: what makes a slot readable]."""
        head, length = slots["head"][used], slots["length"][used]
        good = (head == slots["tail"][used]) & (slots["fixed"]["record"][used] == head - 1)
        good &= (head - 1) % self._layout.num_operations == used
        good &= length == OPERATION_FIXED.itemsize
        chosen: npt.NDArray[Any] = used[good]
        starts = self._layout.operations_offset + chosen * OPERATION_SLOT.itemsize
        data = self._data
        whole = [is_payload_whole(data, at) for at in starts.tolist()]
        chosen = chosen[np.array(whole, bool)]
        self._damage.note_torn(
            len(used) - len(chosen), "operations were being written or are damaged"
        )
        return chosen

    def _states_known(self, head: npt.NDArray[Any], state: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a mask of the state cells that are intact and belong to their slot's operation."""
        stamp = state["head"]
        raw, size = state.tobytes(), OPERATION_STATE.itemsize
        seeds = (stamp & _U32).tolist()
        crcs = [crc32(raw[i * size + 8 : i * size + 32], seed) for i, seed in enumerate(seeds)]
        good = (state["tail"] == stamp) & (state["crc"] == np.array(crcs, np.uint32))
        good &= (state["state"] >= State.STARTED) & (state["state"] <= State.FAILED)
        good &= (stamp <= head) & ((head - stamp) % self._layout.num_operations == 0)
        unused = np.frombuffer(raw, np.uint8).reshape(len(state), size).max(axis=1, initial=0) == 0
        self._damage.note_torn(
            int((~good & ~unused).sum()),
            "states were being written or are damaged: shown as created",
        )
        known: npt.NDArray[Any] = good & (stamp == head)
        return known

    def _mapped(self, refs: npt.NDArray[Any], one: Callable[[int], int]) -> npt.NDArray[Any]:
        unique, inverse = np.unique(refs, return_inverse=True)
        return np.array([one(int(ref)) for ref in unique], np.uint32)[inverse]


def is_payload_whole(data: bytes, at: int) -> bool:
    """Return whether the CRC of the operation slot at offset `at` matches its payload."""
    _, length, crc = _OPERATION_HEAD.unpack_from(data, at)
    begin = at + _OPERATION_HEAD.size
    return bool(length <= _MAX_PAYLOAD_BYTES and crc32(data[begin : begin + length]) == crc)
