"""What a node sees of its ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.node.activity import Activity
from echelon.launcher.node.sighting import Reports, Sighting
from echelon.recorder.format.schema import Identity, Live
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring


def test_a_rank_that_has_closed_its_ring_is_seen_from_outside(tmp_path: Path) -> None:
    """Its heartbeat ends with its program: destructors that compute for long are no stall."""
    identity = Identity(rank=0, pid=os.getpid())
    ring = Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16)
    recorder = Recorder(ring)
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000, sights_ms=0,
                            learns_limits=True)  # fmt: skip
    sighting = Sighting(start, [worker], lambda _: 0)
    first = sighting.look()
    assert first is not None
    assert first.folded
    assert first.ranks == []
    recorder.close()
    second = sighting.look()
    sighting.close()
    assert second is not None
    assert second.folded == []
    assert [(row[0], row[5]) for row in second.ranks] == [(0, 0)], "rank 0, without a ring"


def test_a_node_that_stood_still_does_not_count_that_as_its_ranks_silence(
    tmp_path: Path, monkeypatch
) -> None:
    """Where the whole machine was suspended, its ranks could not do anything either."""
    identity = Identity(rank=0, pid=os.getpid())
    recorder = Recorder(Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16))
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000, sights_ms=0,
                            learns_limits=True)  # fmt: skip
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    sighting = Sighting(start, [worker], lambda _: 0)
    recorder.step(1)

    def age_ms() -> int:
        seen = sighting.look()
        assert seen is not None
        return seen.folded[2]

    now_ns += 500_000_000
    assert age_ms() <= 500
    now_ns += 100_000_000_000
    assert age_ms() <= 3000
    for _ in range(20):
        now_ns += 500_000_000
        last = age_ms()
    sighting.close()
    recorder.close()
    assert 10_000 <= last <= 13_500


def test_a_rank_that_exits_is_not_silent_since_its_start(tmp_path: Path, monkeypatch) -> None:
    """It was seen from outside before it had a ring, and in between it used little processor."""
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=5_000, sights_ms=0,
                            learns_limits=True)  # fmt: skip
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(Activity, "_cpu_ticks", lambda _: 0)
    sighting = Sighting(start, [worker], lambda _: 0)
    loading = sighting.look()
    assert loading is not None
    assert [row[0] for row in loading.ranks] == [0], "it has no ring yet"
    identity = Identity(rank=0, pid=os.getpid())
    recorder = Recorder(Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16))
    for _ in range(100):
        now_ns += 1_000_000_000
        sighting.look()
    recorder.close()
    exiting = sighting.look()
    sighting.close()
    assert exiting is not None
    assert [row[2] for row in exiting.ranks] == [0], "ms without a sign of it"


def test_a_hooked_rank_that_exits_is_not_silent_since_it_last_computed(
    tmp_path: Path, monkeypatch
) -> None:
    """While it trained it used little processor, and only its ring showed its steps."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(Activity, "_cpu_ticks", lambda _: 0)
    monkeypatch.setattr(Activity, "_waited_for_cpu_ns", lambda _: 0)
    monkeypatch.setattr(Activity, "_has_sent", lambda *_: False)
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000, sights_ms=0,
                            learns_limits=False)  # fmt: skip
    identity = Identity(rank=0, pid=os.getpid(), settings={"hooked": "torch"})
    ring = Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16)
    recorder = Recorder(ring)
    recorder.mark_initialized()
    sighting = Sighting(start, [worker], lambda _: 0)
    for _ in range(100):
        now_ns += 1_000_000_000
        ring.live[Live.PROGRESS_MONO_NS] = now_ns
        sighting.look()
    recorder.close()
    exiting = sighting.look()
    sighting.close()
    assert exiting is not None
    assert [row[2] for row in exiting.ranks] == [0], "ms without a sign of it"


@pytest.mark.parametrize("hooked", [True, False])
def test_a_program_that_was_hooked_is_not_silent_while_it_prints(tmp_path: Path, hooked) -> None:
    """It marks no phase of its own: a long evaluation is not a stall."""
    identity = Identity(rank=0, pid=os.getpid(), settings={"hooked": "torch"} if hooked else {})
    ring = Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16)
    recorder = Recorder(ring)
    recorder.mark_initialized()
    hour_ns = 3_600_000_000_000  # a machine that was just booted has less
    ring.live[Live.PROGRESS_MONO_NS] = max(1, time.monotonic_ns() - hour_ns)
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000, sights_ms=0,
                            learns_limits=True)  # fmt: skip
    printed = iter(range(1, 9))
    sighting = Sighting(start, [worker], lambda _: next(printed))
    assert sighting.look() is not None
    sight = sighting.look()
    sighting.close()
    recorder.close()
    assert sight is not None
    is_silent = sight.folded[2] > 60_000
    assert is_silent is not hooked


@pytest.mark.parametrize("initialized", [True, False])
def test_a_rank_that_gets_no_processor_may_take_long_until_it_initializes(
    tmp_path: Path, monkeypatch, initialized
) -> None:
    ring = Ring(
        tmp_path / "ring", Identity(rank=0, pid=os.getpid()), num_operations=16, num_spans=16
    )
    recorder = Recorder(ring)
    if initialized:
        recorder.mark_initialized()
    now_ns = waited_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(Activity, "_cpu_ticks", lambda _: 0)
    monkeypatch.setattr(Activity, "_waited_for_cpu_ns", lambda _: waited_ns)
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000, sights_ms=0,
                            learns_limits=False)  # fmt: skip
    sighting = Sighting(start, [worker], lambda _: 0)
    for _ in range(100):
        now_ns += 1_000_000_000
        waited_ns += 900_000_000
        sight = sighting.look()
    sighting.close()
    recorder.close()
    assert sight is not None
    assert (sight.folded[2] > 60_000) is initialized


def _sights(pending_ms: int = -1, progress_ms: int = 10, ranks: tuple = ()) -> m.Sights:
    return m.Sights(attempt=0, folded=[0, 1, progress_ms, pending_ms, 0, 7, 0], ranks=list(ranks))


def test_what_is_usual_is_reported_rarely_and_what_is_not_at_once() -> None:
    reports = Reports(2.0, stall_timeout_ms=60_000)
    assert reports.is_due(_sights(), 0.0), "the first"
    assert [reports.is_due(_sights(), at) for at in (0.5, 1.0, 1.9, 2.0, 2.5)] == [
        False, False, False, True, False,
    ]  # fmt: skip
    assert reports.is_due(_sights(pending_ms=30_000), 3.0)
    assert reports.is_due(_sights(pending_ms=30_500), 3.5)
    assert reports.is_due(_sights(), 4.0), "that it is over is news"
    assert not reports.is_due(_sights(), 4.5)
    assert reports.is_due(_sights(progress_ms=30_000), 5.0), "silence"
    assert reports.is_due(_sights(), 5.5)
    assert reports.is_due(_sights(ranks=([1, 1, 0, -1, 3, 0, 0],)), 5.6), "a ring was closed"
    assert reports.is_due(_sights(), 5.7, at_once=True)
