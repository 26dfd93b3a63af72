"""Store each distinct signature (the arguments of an operation) once in the log `recent`."""

from __future__ import annotations

import struct
from zlib import crc32

from echelon.recorder.format.schema import MAX_DIMS, MAX_SPLITS, MAX_TENSORS, Flag
from echelon.recorder.write.operations.numbers import clamped_i64
from echelon.recorder.write.ring.ring import Ring

Shapes = tuple[tuple[int, ...], ...]
Splits = tuple[int, ...]

MAX_CALLS = 4096  # cached signatures; a program with more dynamic shapes encodes them again

_SIGNATURE_STRUCT = struct.Struct("<IIIHH")


class Signatures:
    """The entries of `recent` that contain the arguments of operations."""

    def __init__(self, ring: Ring) -> None:
        self._texts = ring.texts
        self._known: dict[bytes, int] = {}
        self._texts.when_a_part_is_full(self._known.clear)

    def add(
        self,
        operation: str,
        dtype: str,
        reduce_op: str,
        shapes: Shapes,
        inputs: Splits,
        outputs: Splits,
    ) -> int:
        """Store a signature in `recent` if it is new; return its position, or 0 on failure."""
        intern = self._texts.intern
        flags, num_tensors, tail = encode_signature(shapes, inputs, outputs)
        refs = intern(str(operation)), intern(str(dtype)), intern(str(reduce_op))
        data = _SIGNATURE_STRUCT.pack(*refs, num_tensors, flags) + tail
        known = self._known.get(data)
        if known is None:
            if len(self._known) >= MAX_CALLS:
                self._known.clear()
            known = self._texts.append(data)
            if known:
                self._known[data] = known
        return known


def encode_signature(shapes: Shapes, inputs: Splits, outputs: Splits) -> tuple[int, int, bytes]:
    """Encode shapes and splits; return (flags, number of tensors, encoded bytes)."""
    counts = len(inputs).to_bytes(4, "little") + len(outputs).to_bytes(4, "little")
    fits = (
        len(shapes) <= MAX_TENSORS
        and all(len(shape) <= MAX_DIMS for shape in shapes)
        and len(inputs) + len(outputs) <= MAX_SPLITS
    )
    numbers = [clamped_i64(n) for shape in shapes for n in shape]
    numbers += [clamped_i64(n) for n in (*inputs, *outputs)]
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    if fits:
        return 0, len(shapes), counts + bytes(len(shape) for shape in shapes) + data
    numel = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= int(n)
        numel += size
    summary = struct.pack("<3q", len(shapes), clamped_i64(numel), crc32(data))
    return int(Flag.SUMMARIZED), 0, counts + summary
