"""Convert the contents of a dump to a record, checking every index and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.recorder.format.schema import (
    MAX_RANKS,
    OPERATION,
    SPAN,
    Fault,
    Group,
    HostFacts,
    Identity,
    LastWords,
    Live,
    Record,
    Signature,
    decode_ranks,
)
from echelon.recorder.read.untrusted import build

_MAX_GROWTH = 4  # of a table in memory over its columns in the file


def record_of_dump(path: Path, top: dict[str, Any]) -> Record:
    """Build a record from the top-level map of a dump.

    Raises:
        DumpFormatError: a field has the wrong type.
        KeyError, TypeError, ValueError, AttributeError, OverflowError: an entry is malformed.
    """
    strings = [_text(text) for text in top["strings"]] or [""]
    groups = _groups(top["groups"])
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
        identity=build(path, Identity, top["identity"]),
        operations=operations,
        spans=spans,
        open_spans=open_spans,
        strings=strings,
        groups=groups,
        signatures=signatures,
        live=tuple(live + [0] * (Live.NUM_WORDS - len(live))),
        last_words=None if words is None else build(path, LastWords, words),
        fault=None if top.get("fault") is None else build(path, Fault, top["fault"]),
        host=build(path, HostFacts, top["host"]),
        dumped_mono_ns=int(top["dumped_mono_ns"]),
        has_ring=_flag(top["has_ring"]),
        warnings=tuple(_text(text) for text in top["warnings"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text field is not a string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("a flag field is not a boolean")
    return value


def _groups(entries: Sequence[Any]) -> list[Group]:
    """Read the groups; raise ValueError if they name more than `MAX_RANKS` ranks in total."""
    left, groups = MAX_RANKS, []
    for name, ranks in entries:
        groups.append(Group(_text(name), decode_ranks(ranks, left)))
        left -= len(groups[-1].ranks)
    return groups


def _signature_of(entry: Sequence[Any]) -> Signature:
    dtype, shapes, inputs, outputs, summary = entry
    return Signature(
        _text(dtype),
        tuple(tuple(int(n) for n in shape) for shape in shapes),
        tuple(int(n) for n in inputs),
        tuple(int(n) for n in outputs),
        None if summary is None else (int(summary[0]), int(summary[1]), int(summary[2])),
    )


def _columns(dtype: np.dtype[Any], table: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Read a table stored by column; skip unknown columns, and fill missing columns with 0."""
    length = int(table["length"])
    columns: Mapping[str, bytes] = table["columns"]
    names = [name for name in dtype.names or () if name in columns]
    if any(len(columns[name]) != length * dtype[name].itemsize for name in names):
        raise ValueError("the length of a column differs from that of its table")
    if length and _MAX_GROWTH * sum(dtype[name].itemsize for name in names) < dtype.itemsize:
        raise ValueError("a table lacks most of its columns")
    out = np.zeros(length, dtype)
    for name in names:
        out[name] = np.frombuffer(columns[name], dtype[name])
    return out


def _check_indices(table: npt.NDArray[Any], column: str, limit: int) -> None:
    if len(table) and int(table[column].max()) >= limit:
        raise ValueError(f"column {column!r} refers to a row that does not exist")
