"""Files made to hurt their reader: one error each, and no memory beyond the file's size."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from zlib import crc32

import msgpack
import pytest

from echelon.errors import DumpFormatError
from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import OPERATION, HostFacts, Identity, Record
from echelon.recorder.read import LiveRing, read
from echelon.recorder.read.dump import empty_record, pack_dump

MB = 1 << 20


def changed(folder: Path, **parts: object) -> Path:
    """Write a dump with some of its parts replaced, and a checksum that fits."""
    path = folder / "rank_0"
    record: Record = empty_record(path, Identity(rank=0), HostFacts())
    top = msgpack.unpackb(pack_dump(record), raw=False)
    top.update(parts)
    top["crc32"] = bytes(4)
    data = msgpack.packb(top, use_bin_type=True)[:-4]
    path.write_bytes(data + crc32(data).to_bytes(4, "little"))
    return path


def peak_bytes(path: Path) -> int:
    """Return how much memory one refusal takes at most."""
    tracemalloc.start()
    try:
        with pytest.raises(DumpFormatError) as refused:
            read(path)
        assert str(path) in str(refused.value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_large_groups_share_one_budget(tmp_path):
    with pytest.raises(DumpFormatError, match="ranks in total"):
        read(changed(tmp_path, groups=[[str(i), "0-599999"] for i in range(2)]))


@pytest.mark.parametrize("part", ["strings", "warnings", "signatures", "identity", "live"])
def test_a_text_nested_a_thousand_deep_is_refused(tmp_path, part):
    nested: object = "x"
    for _ in range(500):
        nested = [nested]
    values = {
        "strings": [nested],
        "warnings": [nested],
        "signatures": [[nested, [], [], [], None]],
        "identity": {"rank": nested},
        "live": [nested],
    }
    assert peak_bytes(changed(tmp_path, **{part: values[part]})) < 10 * MB


def test_a_table_with_one_narrow_column_is_refused(tmp_path):
    length = MB
    table = {"length": length, "columns": {"state": bytes(length)}}
    assert OPERATION.itemsize > 100
    assert peak_bytes(changed(tmp_path, operations=table)) < 10 * MB


def test_a_huge_file_that_begins_like_a_ring_is_refused_unread(ring, tmp_path):
    sparse = tmp_path / "sparse"
    sparse.write_bytes(b"ECHELRNG" + bytes(8000))
    os.truncate(sparse, 6 << 30)
    assert peak_bytes(sparse) < MB
    with pytest.raises(DumpFormatError):
        LiveRing(sparse)


def test_what_lies_behind_a_ring_is_not_read(ring, tmp_path):
    longer = tmp_path / "longer"
    longer.write_bytes(ring.path.read_bytes())
    os.truncate(longer, 6 << 30)
    tracemalloc.start()
    try:
        assert read(longer).identity.rank == 3
        layout = Layout(ring.num_operations, ring.num_spans)
        assert tracemalloc.get_traced_memory()[1] < 4 * layout.file_bytes
    finally:
        tracemalloc.stop()


def test_a_dump_of_another_type_throughout_is_refused(tmp_path):
    for part in ("strings", "groups", "operations", "spans", "host", "has_ring"):
        assert peak_bytes(changed(tmp_path, **{part: 7 if part != "has_ring" else [[]]})) < MB
