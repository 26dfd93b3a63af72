"""The garbage collector's pauses, and a memory that stays as it was at the start."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from echelon.recorder.format.schema import Live
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.setup.pauses import KEPT_FROM_NS, GarbagePauses


@pytest.fixture
def kept_from_ns() -> int:
    return KEPT_FROM_NS


@pytest.fixture
def pauses(recorder, kept_from_ns):
    pauses = GarbagePauses(recorder, kept_from_ns)
    pauses.start()
    yield pauses
    pauses.stop()


def test_each_collection_counts(pauses, look):
    before = look().live
    gc.collect(0)
    gc.collect(2)
    after = look().live
    assert after[Live.NUM_GC_PAUSES] - before[Live.NUM_GC_PAUSES] >= 2
    assert after[Live.GC_PAUSES_NS] > before[Live.GC_PAUSES_NS]


@pytest.mark.parametrize("kept_from_ns", [0])
def test_a_long_pause_is_a_span_and_no_progress(pauses, recorder, look):
    recorder.step(7)
    before = look()
    gc.collect(2)
    record = look()
    row = record.spans[-1]
    assert record.strings[row["name"]] == "gc"
    assert record.strings[row["detail"]] == "generation 2"
    assert row["step"] == 7
    assert 0 < row["started_mono_ns"] < row["ended_mono_ns"]
    for word in (Live.PROGRESS_MONO_NS, Live.NUM_SPANS):
        assert record.live[word] == before.live[word]


@pytest.mark.parametrize("kept_from_ns", [1 << 60])
def test_a_short_pause_is_no_span(pauses, look):
    gc.collect(2)
    assert len(look().spans) == 0


def test_nothing_is_recorded_once_stopped(pauses, look):
    pauses.stop()
    before = look().live[Live.NUM_GC_PAUSES]
    gc.collect()
    assert look().live[Live.NUM_GC_PAUSES] == before
    pauses.stop()


def test_memory_does_not_grow_over_100_000_operations(ring):
    recorder = Recorder(ring)
    group = recorder.group("world", range(8))
    shape = ((1024, 1024),)

    def work(count: int) -> None:
        for i in range(count):
            number = recorder.begin(
                group, "all_reduce", sequence=i, dtype="float32", shapes=shape, reduce_op="sum"
            )
            recorder.started(number)
            recorder.completed(number)
            if i % 100 == 0:
                recorder.step()
                recorder.close_span(recorder.open_span("compute", "", 1))

    work(1000)  # every call site, text and thread has been met
    tracemalloc.start()
    try:
        work(1000)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work(100_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert recorder.begin(group, "barrier") == 102_000
    assert grown < 10_000  # a tenth of a byte for each: counters, not records
