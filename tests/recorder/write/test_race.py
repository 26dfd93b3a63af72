"""A reader beside a writer that never stops: whatever it gets is whole."""

from __future__ import annotations

import time

import numpy as np
import pytest

from echelon.recorder.format.schema import State
from echelon.recorder.read import LiveRing, read_ring

WRITER = """
import sys
from echelon.recorder.current import current

recorder = current()
group = recorder.group("world", (1, 3))
shapes = [((i, 2 * i),) for i in range(61)]
print("ready", flush=True)
for i in range({count}):
    number = recorder.begin(
        group, "all_reduce", sequence=i, num_bytes=7919 * i, tag=i & 0x7fffffff, root=i % 1009,
        dtype="float32", shapes=shapes[i % 61], timeout_s=1.0,
    )
    recorder.started(number)
    recorder.completed(number)
"""


def check(record) -> int:
    """Check that each row is one that the writer wrote; return the newest one's number."""
    rows = record.operations
    if not len(rows):
        return 0
    number = rows["record"].astype(np.int64)
    assert (np.diff(number) > 0).all()
    assert (rows["sequence"] == number).all()
    assert (rows["num_bytes"] == 7919 * number).all()
    assert (rows["tag"] == number & 0x7FFFFFFF).all()
    assert (rows["root"] == number % 1009).all()
    shapes = [record.signatures[i].shapes[0][0] for i in rows["signature"]]
    assert (np.array(shapes) == number % 61).all()
    assert {record.strings[i] for i in rows["operation"]} == {"all_reduce"}
    done = rows[rows["state"] == State.COMPLETED]
    assert (done["created_mono_ns"] <= done["started_mono_ns"]).all()
    assert (done["started_mono_ns"] <= done["completed_mono_ns"]).all()
    begun = rows[rows["state"] == State.CREATED]
    assert (begun["started_mono_ns"] == 0).all()
    return int(number[-1])


def race(program, count: int, size: int) -> tuple[int, int]:
    """Read all the while; return how many reads there were, and how many met a torn slot."""
    writer = program(WRITER.format(count=count), ECHELON_RECORDER_SIZE=str(size))
    writer.wait_for("ready")
    live = LiveRing(writer.ring)
    reads = torn = newest = 0
    try:
        while writer.process.poll() is None:
            called, pending = live.pending()
            assert pending <= size
            assert called <= time.monotonic_ns()
            record = read_ring(writer.ring)
            reads += 1
            torn += bool(record.warnings)
            now = check(record)
            assert now >= newest
            newest = now
    finally:
        live.close()
    code, _, err = writer.end()
    assert code == 0, err
    record = read_ring(writer.ring)
    assert check(record) == count - 1
    assert len(record.operations) == size
    assert record.warnings == ()
    return reads, torn


def test_a_reader_beside_a_writer_gets_only_whole_records(program):
    reads, _ = race(program, 60_000, size=32)
    assert reads > 0


@pytest.mark.slow
def test_a_reader_beside_a_writer_of_ten_million_records(program):
    reads, torn = race(program, 10_000_000, size=32)
    assert reads > 1000
    assert torn > 0  # else the two never met
    print(f"{reads} reads, {torn} of them beside a slot that was being written")
