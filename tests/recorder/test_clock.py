"""Clock offsets, measured against an imagined rank 0 over an imagined network."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest

from echelon.host.identity import clock_id
from echelon.recorder.clock import (
    MOVED_NS,
    NOT_MEASURED,
    ClockOffset,
    HostTime,
    measure_offset,
)
from echelon.recorder.read import read_ring
from echelon.recorder.write.recorder import Recorder
from tests.support.ranks import run_ranks

S = 1_000_000_000


class Network:
    """A clock here, a clock there, and trips that take their time."""

    def __init__(self, offset_ns: int, trips: list[tuple[int, int]]) -> None:
        self.here_ns = 1_000_000
        self.offset_ns = offset_ns
        self.trips = iter(trips)

    def now(self) -> int:
        return self.here_ns

    def ask(self) -> int:
        there, back = next(self.trips)
        self.here_ns += there
        answer = self.here_ns + self.offset_ns
        self.here_ns += back
        return answer


def test_equal_trips_measure_exactly():
    network = Network(-123_456_789, [(500, 500)])
    assert measure_offset(network.ask, num_rounds=1, now=network.now) == ClockOffset(
        -123_456_789, 500
    )


def test_the_shortest_round_trip_counts():
    network = Network(77, [(9000, 10), (100, 100), (20, 4000)])
    assert measure_offset(network.ask, num_rounds=3, now=network.now) == ClockOffset(77, 100)


@pytest.mark.parametrize("seed", range(20))
def test_the_truth_lies_within_the_error(seed):
    choose = random.Random(seed)
    offset_ns = choose.randrange(-(10**15), 10**15)
    trips = [(choose.randrange(1, 10**6), choose.randrange(1, 10**6)) for _ in range(16)]
    network = Network(offset_ns, trips)
    found = measure_offset(network.ask, now=network.now)
    assert abs(found.offset_ns - offset_ns) <= found.error_ns
    assert found.error_ns <= min((there + back + 1) // 2 for there, back in trips)


class Host:
    """The clocks of a host, as its kernel and its administrator move them."""

    def __init__(self) -> None:
        self.time = HostTime(mono_ns=5 * S, wall_ns=1_700_000_000 * S, boot_ns=7 * S)

    def run(self, ns: int, *, slewed_ns: int = 0) -> HostTime:
        return self._moved(ns, ns + slewed_ns, ns)

    def set_wall(self, by_ns: int) -> HostTime:
        return self._moved(0, by_ns, 0)

    def suspend(self, ns: int) -> HostTime:
        return self._moved(0, ns, ns)

    def _moved(self, mono: int, wall: int, boot: int) -> HostTime:
        now = self.time
        self.time = HostTime(now.mono_ns + mono, now.wall_ns + wall, now.boot_ns + boot)
        return self.time


@pytest.fixture
def host(recorder: Recorder) -> Host:
    host = Host()
    recorder.identify(clock_offset_ns=77, clock_error_ns=9000)
    recorder.look_at_clocks(host.time)
    return host


def test_a_record_keeps_its_wall_time_where_the_clock_is_set(recorder, ring, host):
    for now in (host.run(3600 * S), host.set_wall(-3600 * S), host.run(60 * S)):
        recorder.look_at_clocks(now)
    identity = read_ring(ring.path).identity
    stamp = host.time.mono_ns
    assert identity.wall_ns + (stamp - identity.mono_ns) == host.time.wall_ns
    assert (identity.clock_offset_ns, identity.clock_error_ns) == (77, 9000)


def test_a_record_follows_a_clock_that_is_slewed(recorder, ring, host):
    """100 parts per million, looked at twice a second for an hour."""
    for _ in range(7200):
        recorder.look_at_clocks(host.run(S // 2, slewed_ns=50_000))
    identity = read_ring(ring.path).identity
    shown = identity.wall_ns + (host.time.mono_ns - identity.mono_ns)
    assert abs(shown - host.time.wall_ns) <= MOVED_NS


def test_a_host_that_was_suspended_does_not_know_its_offset_any_more(recorder, ring, host):
    recorder.look_at_clocks(host.run(60 * S))
    assert read_ring(ring.path).identity.clock_error_ns == 9000
    recorder.look_at_clocks(host.suspend(600 * S))
    identity = read_ring(ring.path).identity
    assert identity.clock_error_ns == NOT_MEASURED
    assert identity.wall_ns - identity.mono_ns == host.time.wall_ns - host.time.mono_ns


def test_ranks_that_share_rank_0s_clock_share_it_after_a_suspension(recorder, ring, host):
    recorder.identify(clock_offset_ns=0, clock_error_ns=0)
    recorder.look_at_clocks(host.suspend(600 * S))
    assert read_ring(ring.path).identity.clock_error_ns == 0


def test_clocks_that_could_not_be_read_together_change_nothing(recorder, ring, host):
    before = read_ring(ring.path).identity
    recorder.look_at_clocks(None)
    recorder.look_at_clocks(host.run(S))
    assert read_ring(ring.path).identity == before


def test_two_threads_that_identify_lose_nothing_of_each_other(recorder, ring):
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    host = Host()
    try:
        for size in range(2, 40):
            looks = [host.set_wall(S) for _ in range(20)]
            threads = [
                threading.Thread(
                    target=lambda own=looks: [recorder.look_at_clocks(t) for t in own]
                ),
                threading.Thread(target=lambda size=size: recorder.identify(world_size=size)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert recorder.identity.world_size == size
    finally:
        sys.setswitchinterval(interval_s)
    assert read_ring(ring.path).identity == recorder.identity


def test_this_hosts_clocks_are_read_together():
    """By chance a thread is put aside between the readings, but not each time."""
    found = next(now for _ in range(1000) if (now := HostTime.read()) is not None)
    assert abs(found.mono_ns - time.monotonic_ns()) < 60 * S
    assert found.boot_ns >= found.mono_ns - MOVED_NS


def test_what_the_trip_raises_goes_through():
    def ask() -> int:
        raise TimeoutError("rank 0")

    with pytest.raises(TimeoutError, match="rank 0"):
        measure_offset(ask)


@pytest.mark.parametrize(
    ("environ", "error_ns"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8"}, 0),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 0),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, NOT_MEASURED),
        ({"WORLD_SIZE": "8"}, NOT_MEASURED),
    ],
    ids=["rank 0", "one host", "two hosts", "not said"],
)
def test_ranks_on_rank_0s_host_need_no_measurement(program, environ, error_ns):
    one = program("from echelon.recorder import step; step()", **environ)
    assert one.end()[0] == 0
    identity = read_ring(one.ring).identity
    assert (identity.clock_offset_ns, identity.clock_error_ns) == (0, error_ns)


def _clock_id(rank, world_size):
    return clock_id()


@pytest.mark.ranks
def test_processes_of_one_host_name_one_clock():
    names = run_ranks(_clock_id, 2)
    assert names == [clock_id()] * 2
    assert names[0]
