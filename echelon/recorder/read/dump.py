"""Write dump files: copies of black boxes in an incident folder.

A dump is a columnar msgpack file. Each field is one little-endian array, so that dumps of thousands
of ranks load quickly. A dump becomes visible only when it is complete.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import numpy.typing as npt

from echelon.recorder.format.schema import (
    DUMP_CRC_MARK,
    DUMP_KIND,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    OPERATION,
    SPAN,
    HostFacts,
    Identity,
    Record,
    encode_ranks,
)


def pack_dump(record: Record) -> bytes:
    """Serialize a record as the contents of a dump file."""
    top = {
        "kind": DUMP_KIND,
        "version": [FORMAT_MAJOR, FORMAT_MINOR],
        "identity": asdict(record.identity),
        "live": list(record.live),
        "has_ring": record.has_ring,
        "dumped_mono_ns": record.dumped_mono_ns,
        "strings": list(record.strings),
        "groups": [[group.name, encode_ranks(group.ranks)] for group in record.groups],
        "signatures": [
            [s.dtype, s.shapes, s.input_splits, s.output_splits, s.summary]
            for s in record.signatures
        ],
        "operations": _table(record.operations),
        "spans": _table(record.spans),
        "open_spans": _table(record.open_spans),
        "last_words": None if record.last_words is None else asdict(record.last_words),
        "fault": None if record.fault is None else asdict(record.fault),
        "host": asdict(record.host),
        "warnings": list(record.warnings),
        "crc32": bytes(4),
    }
    data: bytes = msgpack.packb(top, use_bin_type=True)[:-4]
    assert data.endswith(DUMP_CRC_MARK), data[-16:]
    return data + crc32(data).to_bytes(4, "little")


def write_dump(record: Record, path: Path) -> None:
    """Write a record as a dump file.

    Raises:
        OSError: the file cannot be written.
    """
    data = pack_dump(record)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)  # noqa: PTH105 -- says that an older dump is replaced in one step
    except OSError:
        part.unlink(missing_ok=True)
        raise


def empty_record(path: Path, identity: Identity, host: HostFacts, *warnings: str) -> Record:
    """Return the record of a rank that has no ring; it contains only facts from the host."""
    return Record(
        path=str(path),
        identity=identity,
        operations=np.zeros(0, OPERATION),
        spans=np.zeros(0, SPAN),
        open_spans=np.zeros(0, SPAN),
        strings=[""],
        groups=[],
        signatures=[],
        host=host,
        has_ring=False,
        warnings=warnings,
    )


def _table(rows: npt.NDArray[Any]) -> dict[str, Any]:
    columns = {name: np.ascontiguousarray(rows[name]).tobytes() for name in rows.dtype.names or ()}
    return {"length": len(rows), "columns": columns}
