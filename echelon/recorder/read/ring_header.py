"""Read a ring's header, identity, last words and fatal signal."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any
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
    Layout,
)
from echelon.recorder.format.schema import (
    BLOB_HEAD,
    FAULT,
    HEADER,
    MAX_SLOTS,
    OPERATION_SLOT,
    RING_MAGIC,
    SPAN_SLOT,
    Fault,
    Identity,
    LastWords,
)
from echelon.recorder.read.damage import Damage
from echelon.recorder.read.untrusted import build, check_version

_MAX_SIGNAL = 64


def check_header(path: Path, data: bytes | mmap.mmap, file_bytes: int = -1) -> Layout:
    """Check a ring's header and return the ring's layout.

    Args:
        data: the bytes of the file, or of its first pages.
        file_bytes: the size of the file; -1 means the length of `data`.

    Raises:
        DumpFormatError: the file is not a ring, has a different major version, or is truncated.
    """
    if len(data) < LIVE_OFFSET + LIVE_BYTES or data[: len(RING_MAGIC)] != RING_MAGIC:
        raise DumpFormatError(f"{path} is not an echelon ring", path=path)
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
            (
                f"{path}: the ring is truncated; it has {size} B, but its header declares "
                f"{layout.file_bytes} B"
            ),
            path=path,
        )
    return layout


def read_identity(data: bytes, path: Path, damage: Damage) -> Identity:
    """Return the writer's identity, from the newer of its two copies.

    Raises:
        DumpFormatError: neither copy is intact.
    """
    found = [_blob(data, at, IDENTITY_BYTES) for at in IDENTITY_OFFSETS]
    whole = [one for one in found if one is not None]
    if not whole:
        raise DumpFormatError(f"{path}: the ring's identity is damaged", path=path)
    for at, one in zip(IDENTITY_OFFSETS, found, strict=True):
        if one is None and any(data[at : at + BLOB_HEAD.itemsize]):
            damage.warn("one copy of the identity is damaged; using the other copy")
    return build(path, Identity, max(whole, key=lambda one: one[0])[1])


def read_last_words(data: bytes, path: Path, damage: Damage) -> LastWords | None:
    """Return the rank's last words. If they are damaged, add a warning and return None."""
    found = _blob(data, LAST_WORDS_OFFSET, LAST_WORDS_BYTES)
    if found is None:
        if any(data[LAST_WORDS_OFFSET : LAST_WORDS_OFFSET + BLOB_HEAD.itemsize]):
            damage.warn("the rank's last words (its uncaught exception) are damaged")
        return None
    try:
        return build(path, LastWords, found[1])
    except DumpFormatError:
        damage.warn("the rank's last words (its uncaught exception) are damaged")
        return None


def read_fault(data: bytes) -> Fault | None:
    """Return the signal that ended the rank, or None if no signal was recorded."""
    row = np.frombuffer(data, FAULT, 1, FAULT_OFFSET)[0]
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


def _frame_text(frame: npt.NDArray[Any]) -> str:
    file = bytes(frame["file"]).decode("utf-8", "replace")
    return f"{file}+{int(frame['offset']):#x}" if file else f"{int(frame['address']):#x}"


def _blob(data: bytes, at: int, room: int) -> tuple[int, dict[str, Any]] | None:
    """Return a blob as (stamp, value), or None if it is missing, incomplete or damaged."""
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
