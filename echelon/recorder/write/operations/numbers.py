"""Clamp caller-supplied numbers to the range of the fields that store them."""

from __future__ import annotations

import struct
from typing import Any

_I64 = (-(1 << 63), (1 << 63) - 1)


def clamped_i64(number: Any) -> int:
    """Return the signed 64-bit integer that is nearest to `number`.

    Raises:
        TypeError, ValueError, OverflowError: the argument is not a number.
    """
    return min(max(int(number), _I64[0]), _I64[1])


def moment(at_mono_ns: Any, now: int) -> int:
    """Return the caller's timestamp, or `now` if the timestamp is 0 or invalid."""
    try:
        return clamped_i64(at_mono_ns) or now
    except (TypeError, ValueError, OverflowError):
        return now


def pack_clamped(form: struct.Struct, *fields: Any) -> bytes:
    """Pack integers, clamping each to the range of its field; bytes are packed unchanged.

    Raises:
        TypeError, ValueError, OverflowError: a field is not a number.
    """
    codes = [code for code in form.format if code.isalpha()]
    return form.pack(
        *(
            field if code == "s" else _clamped(field, code)
            for field, code in zip(fields, codes, strict=True)
        )
    )


def _clamped(number: Any, code: str) -> int:
    bits = 8 * struct.calcsize("<" + code)
    low, high = (0, 1 << bits) if code.isupper() else (-(1 << (bits - 1)), 1 << (bits - 1))
    return min(max(int(number), low), high - 1)
