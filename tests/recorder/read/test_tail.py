"""What a living ring has gained since the last look."""

from __future__ import annotations

import os

from echelon.recorder.format.schema import Identity
from echelon.recorder.read import LiveRing
from echelon.recorder.read.tail import MAX_NEW, Tail
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring


def _ended(news) -> dict[tuple[int, int, bool], int]:
    return {(k.name, k.site, k.is_span): len(lasted) for k, lasted in news.ended}


def test_each_ended_operation_is_told_once_and_what_waits_at_each_look(recorder, ring):
    group = recorder.group("world", (0, 1))
    live, tail = LiveRing(ring.path), Tail()
    first = recorder.begin(group, "all_reduce")
    news = tail.read(live)
    (one,) = news.pending
    assert (news.ended, live.text(one.key.name).partition("\n")[0]) == ([], "world")
    assert "test_tail.py" in live.text(one.key.site)
    recorder.completed(first)
    failed = recorder.begin(group, "all_reduce")
    recorder.failed(failed, ValueError("no"))
    news = tail.read(live)
    assert _ended(news) == {(one.key.name, one.key.site, False): 1}
    assert int(news.ended[0][1][0]) >= 0
    assert news.pending == []
    assert tail.read(live).ended == []
    live.close()


def test_an_operation_that_outlives_the_ring_costs_its_sample_alone(recorder, ring):
    group = recorder.group("world", (0, 1))
    live, tail = LiveRing(ring.path), Tail()
    recorder.begin(group, "barrier")
    assert len(tail.read(live).pending) == 1
    for _ in range(3 * ring.num_operations):
        recorder.completed(recorder.begin(group, "all_reduce"))
    news = tail.read(live)
    assert 0 < sum(_ended(news).values()) <= ring.num_operations
    assert len(news.pending) <= 1
    live.close()


def test_phases_are_told_with_their_thread_and_the_innermost_counts(recorder, ring):
    live, tail = LiveRing(ring.path), Tail()
    outer = recorder.open_span("epoch", "", 1)
    inner = recorder.open_span("checkpoint", "", 1)
    news = tail.read(live)
    assert [live.text(one.key.name) for one in news.spans] == ["checkpoint"]
    recorder.close_span(inner)
    news = tail.read(live)
    assert [live.text(one.key.name) for one in news.spans] == ["epoch"]
    assert [live.text(k.name) for k, _ in news.ended if k.is_span] == ["checkpoint"]
    recorder.close_span(outer)
    assert tail.read(live).spans == []
    live.close()


def test_a_busy_rank_is_sampled(tmp_path):
    ring = Ring(tmp_path / "ring", Identity(rank=0, pid=os.getpid()), num_operations=4096,
                num_spans=16)  # fmt: skip
    recorder = Recorder(ring)
    group = recorder.group("world", (0, 1))
    live, tail = LiveRing(ring.path), Tail()
    for _ in range(3000):
        recorder.completed(recorder.begin(group, "all_reduce"))
    assert sum(_ended(tail.read(live)).values()) == MAX_NEW
    live.close()
    recorder.close()


def test_another_programs_ring_begins_a_new_history(tmp_path):
    def made() -> tuple[LiveRing, Recorder]:
        ring = Ring(tmp_path / "ring", Identity(rank=0, pid=os.getpid()), num_operations=16,
                    num_spans=16)  # fmt: skip
        return LiveRing(ring.path), Recorder(ring)

    live, recorder = made()
    tail = Tail()
    assert tail.read(live).is_other_ring
    assert not tail.read(live).is_other_ring
    recorder.close()
    (tmp_path / "ring").rename(tmp_path / "old")
    other, recorder = made()
    assert tail.read(other).is_other_ring
    for one in (live, other):
        one.close()
    recorder.close()
