"""Clock offsets, measured against an imagined rank 0 over an imagined network."""

from __future__ import annotations

import random

import pytest

from echelon.host.identity import clock_id
from echelon.recorder.clock import NOT_MEASURED, ClockOffset, measure_offset
from echelon.recorder.read import read_ring
from tests.ranks import run_ranks


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
