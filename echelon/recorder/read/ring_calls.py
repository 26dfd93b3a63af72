"""Read a ring's signatures (the recorded arguments of operations)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from echelon.recorder.format.schema import SIGNATURE_FIXED, Flag, Signature
from echelon.recorder.read.damage import Damage
from echelon.recorder.read.ring_texts import DAMAGED, OVERWRITTEN, RingTexts

_SIGNATURE_FIXED = struct.Struct("<IIIHH")


class Call(NamedTuple):
    """A decoded signature, as indices into `strings` and `signatures`."""

    operation: int
    reduce_op: int
    signature: int
    flags: int


class RingCalls:
    """A reader of signatures. Each signature is decoded only once."""

    def __init__(self, texts: RingTexts, damage: Damage) -> None:
        self.signatures: list[Signature] = []
        self._texts = texts
        self._damage = damage
        self._known: dict[int, Call | None] = {}

    def call(self, ref: int) -> Call | None:
        """Return the signature to which `ref` refers; None if the signature was overwritten."""
        if ref in self._known:
            return self._known[ref]
        data, call = self._texts.recent(ref), None
        if data is not None:
            call = self.decoded(data)
        elif not self._texts.is_overwritten(ref):
            self._damage.num_torn += 1
            call = self.damaged("the signature of an operation is damaged")
        self._known[ref] = call
        return call

    def decoded(self, data: bytes) -> Call:
        """Decode a signature's bytes; return a placeholder if they are malformed."""
        try:
            operation, dtype, reduce_op, num_tensors, flags = _SIGNATURE_FIXED.unpack_from(data)
            signature = decode_signature(
                self._texts.text(dtype),
                num_tensors,
                bool(flags & Flag.SUMMARIZED),
                data[SIGNATURE_FIXED.itemsize :],
            )
        except (ValueError, struct.error):
            return self.damaged("the signature of an operation cannot be read")
        self.signatures.append(signature)
        return Call(
            self._texts.string(operation),
            self._texts.string(reduce_op),
            len(self.signatures) - 1,
            flags & Flag.SUMMARIZED,
        )

    def overwritten(self) -> Call:
        """Return a placeholder for an overwritten signature."""
        return self._new(OVERWRITTEN)

    def damaged(self, warning: str) -> Call:
        """Record a warning; return a placeholder for a signature that cannot be read."""
        self._damage.warn(warning)
        return self._new(DAMAGED)

    def _new(self, text: str) -> Call:
        self.signatures.append(Signature(text))
        self._texts.strings.append(text)
        return Call(len(self._texts.strings) - 1, 0, len(self.signatures) - 1, 0)


def decode_signature(dtype: str, num_tensors: int, summarized: bool, tail: bytes) -> Signature:
    """Decode a signature's tail, written by `operations.encode_signature`.

    Raises:
        ValueError: the encoded lengths do not match the number of bytes.
    """
    if len(tail) < 8:
        raise ValueError("the signature is too short")
    num_inputs, num_outputs = (int(v) for v in np.frombuffer(tail, "<u4", 2))
    if summarized:
        count, numel, crc = (int(v) for v in np.frombuffer(tail, "<i8", 3, 8))
        return Signature(dtype, summary=(count, numel, crc))
    ndims = list(tail[8 : 8 + num_tensors])
    numbers = np.frombuffer(tail, "<i8", -1, 8 + num_tensors).tolist()
    if len(ndims) != num_tensors or len(numbers) != sum(ndims) + num_inputs + num_outputs:
        raise ValueError("the signature's lengths do not match its size")
    shapes, at = [], 0
    for ndim in ndims:
        shapes.append(tuple(numbers[at : at + ndim]))
        at += ndim
    inputs = tuple(numbers[at : at + num_inputs])
    return Signature(dtype, tuple(shapes), inputs, tuple(numbers[at + num_inputs :]))
