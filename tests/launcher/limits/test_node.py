"""The limits that a node's ranks have learned, from their rings and their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.launcher.incident.worker import Worker
from echelon.launcher.limits import history
from echelon.launcher.limits.node import NodeLimits, Summary
from echelon.recorder.format.schema import Identity
from echelon.recorder.read import LiveRing
from echelon.recorder.stall.watchdog import Sight
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring

S = 1_000_000_000


class Rank:
    """A rank that records, at times of the test's own, and prints."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = time.monotonic_ns()
        ring = Ring(
            folder / "ring",
            Identity(rank=0, pid=1),
            num_operations=64,
            num_spans=16,
        )
        self.recorder = Recorder(ring)
        self.live = LiveRing(ring.path)
        self.worker = Worker(rank=0, local_rank=0, folder=folder, pid=os.getpid())
        self.num_printed = 500
        self.limits = NodeLimits(1, 60.0, lambda _: self.num_printed)
        self.progress_ns = self.now_ns

    def look(self, *, initialized: bool = True) -> Summary:
        sight = Sight(rank=0, initialized=initialized, progress_mono_ns=self.progress_ns)
        self.limits.see(self.worker, self.live, sight, self.now_ns, self._age_s)
        return self.limits.sum_up([sight], self._age_s)

    def _age_s(self, then_ns: int) -> float:
        return (self.now_ns - then_ns) / S

    def close(self) -> None:
        self.live.close()
        self.recorder.close()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch) -> Iterator[Rank]:
    monkeypatch.setattr("echelon.launcher.node.activity._cpu_ticks", lambda _: 0)
    monkeypatch.setattr("echelon.launcher.node.activity.sockets", lambda *_: [])
    rank = Rank(tmp_path)
    yield rank
    rank.close()


def test_what_a_rank_printed_before_it_became_quiet_is_no_sign_of_work(rank):
    ages = []
    for _ in range(20):
        rank.now_ns += S // 2
        ages.append(rank.look().worked_ms)
    assert ages == [500 * n for n in range(1, 21)]
    rank.num_printed += 1
    assert rank.look().worked_ms == 0
    rank.now_ns += S
    assert rank.look().worked_ms == 1000


def test_a_wait_beyond_its_history_is_told_with_its_call_site(rank, monkeypatch):
    monkeypatch.setattr(history, "MIN_SAMPLES", 20)
    group = rank.recorder.group("dp", (0, 1))
    assert rank.look(initialized=False).is_excused

    def call() -> int:
        return rank.recorder.begin(group, "all_reduce")  # one call site

    for _ in range(60):
        rank.now_ns += 2 * S
        rank.progress_ns = rank.now_ns
        rank.recorder.completed(call())
        seen = rank.look()
    assert (seen.late_rank, seen.is_excused) == (-1, False)
    call()
    rank.now_ns = time.monotonic_ns() + 11 * S
    seen = rank.look()
    assert (seen.late_rank, seen.limit_ms) == (0, 10_000)
    assert seen.late_ms >= 11_000
    assert "test_node.py" in seen.what
    assert "in group 'dp': limit 10 s, 99.9 % of 44 took at most " in seen.what
    (row,) = rank.limits.rows()
    assert (row.name, row.limit_s, row.num) == ("dp", 10.0, 44)


def test_a_phase_without_a_history_excuses_until_it_ends(rank):
    span = rank.recorder.open_span("checkpoint", "", 1)
    assert rank.look() == Summary(worked_ms=0, is_excused=True)
    rank.recorder.close_span(span)
    assert not rank.look().is_excused
    span = rank.recorder.open_span("data_wait", "", 1)
    assert rank.look().is_excused
