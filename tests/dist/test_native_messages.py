"""How the C core gives messages to receives: order, tags, any source, deadlines, memory."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends.shm import native
from echelon.dist.backends.shm.faults import Fault
from echelon.dist.operation.operation import ANY_SOURCE, OPERATIONS, Operation
from echelon.errors import CollectiveError, CollectiveMismatchError
from tests.dist.native_ranks import Ranks, Thread, barrier, recv, send, wait_until
from tests.support.ranks import run_ranks

FOREVER_S = 600.0
LARGE = 50_000  # many times a ring
ANY = -1


@pytest.fixture
def ranks():
    group = Ranks(3)
    yield group
    group.close()


def number(value: float, size: int = 1) -> np.ndarray:
    return np.full(size, value, np.float32)


def test_large_messages_of_two_tags_are_received_in_the_other_order(ranks):
    first, second = number(0, LARGE), number(0, LARGE)
    ranks[0], ranks[1]

    def be_sender() -> None:
        assert ranks[0].run(*send(number(1, LARGE), 1, tag=5)) is None
        assert ranks[0].run(*send(number(2, LARGE), 1, tag=9)) is None

    sender = Thread(be_sender)
    assert ranks[1].run(*recv(second, 0, tag=9)) is None
    assert ranks[1].run(*recv(first, 0, tag=5)) is None
    sender.join()
    assert (first == 1).all()
    assert (second == 2).all()


def test_many_tags_complete_in_the_order_of_the_receives(ranks):
    tags = list(range(40))
    sent = [ranks[0].start(*send(number(tag, 3000), 1, tag=tag)) for tag in tags]
    for tag in reversed(tags):
        got = number(-1, 3000)
        assert ranks[1].run(*recv(got, 0, tag=tag)) is None
        assert (got == tag).all(), tag
    assert all(ticket.wait(60.0) for ticket in sent)


def test_a_receive_posted_while_its_message_is_being_stashed_gets_it(ranks):
    """The first part lies in the stash already, the rest goes to its place directly."""
    other, got = number(0), number(0, LARGE)
    x = np.arange(LARGE, dtype=np.float32)
    ahead = ranks[1].start(*recv(other, 0, tag=1))  # makes the core take everything out
    sent = ranks[0].start(*send(x, 1, tag=2))
    wait_until(lambda: ranks[1].statistics()["stashed"] == 1)
    assert ranks[1].run(*recv(got, 0, tag=2)) is None
    assert sent.wait(60.0)
    assert np.array_equal(got, x)
    assert ranks[0].run(*send(number(1), 1, tag=1)) is None
    assert ahead.wait(60.0)


def test_a_receive_from_any_rank_reports_the_sender(ranks):
    for sender in (2, 0):
        assert ranks[sender].run(*send(number(sender + 10), 1, tag=3)) is None
    for sender in (2, 0):
        got = number(0)
        ticket = ranks[1].start(*recv(got, ANY, tag=3))
        assert ticket.wait(60.0)
        assert (ticket.source, got[0]) == (sender, sender + 10)


def test_a_receive_that_is_withdrawn_ends_and_the_next_one_gets_its_message(ranks):
    first, second = number(0), number(0)
    withdrawn, kept = (ranks[1].start(*recv(x, ANY, tag=3)) for x in (first, second))
    named = ranks[1].start(*recv(number(0), 2, tag=4))
    assert withdrawn.withdraw()
    assert not withdrawn.withdraw()
    assert withdrawn.wait(60.0)
    assert (withdrawn.fault, withdrawn.source) == (None, -1)
    assert ranks[0].run(*send(number(5), 1, tag=3)) is None
    assert kept.wait(60.0)
    assert (kept.source, first[0], second[0]) == (0, 0, 5)
    assert not kept.withdraw()
    assert not named.withdraw()
    assert ranks[2].run(*send(number(6), 1, tag=4)) is None
    assert named.wait(60.0)


def test_a_message_and_a_withdrawal_that_race_have_one_winner(ranks):
    ranks[0], ranks[1]
    for turn in range(300):
        got = number(-1)
        ticket = ranks[1].start(*recv(got, ANY, tag=3))
        sender = Thread(lambda turn=turn: ranks[0].run(*send(number(turn), 1, tag=3)))
        is_withdrawn = ticket.withdraw()
        assert ticket.wait(60.0)
        assert (ticket.source == -1) == is_withdrawn
        if is_withdrawn:
            assert got[0] == -1
            assert ranks[1].run(*recv(got, 0, tag=3)) is None
        assert got[0] == turn
        sender.join()


def test_receives_from_any_rank_follow_the_order_of_the_sends(ranks):
    """Also where some of the messages are in the stash and others still in their rings."""
    order = [2, 0, 0, 2, 0, 2, 2]
    for position, sender in enumerate(order):
        assert ranks[sender].run(*send(number(position, 60), 1, tag=4)) is None
        if position == 3:  # asks rank 2 alone: its messages are stashed, rank 0's are not
            assert ranks[2].run(*send(number(-1), 1, tag=8)) is None
            assert ranks[1].run(*recv(number(0), 2, tag=8)) is None
    for position, sender in enumerate(order):
        got = number(0, 60)
        ticket = ranks[1].start(*recv(got, ANY, tag=4))
        assert ticket.wait(60.0)
        assert (got[0], ticket.source) == (position, sender)


def test_the_receive_that_was_posted_first_gets_the_message(ranks):
    """Whether it names the sender or takes any."""
    a, b, c, d = (number(0) for _ in range(4))
    tickets = [
        ranks[1].start(*recv(a, 0, tag=1)),
        ranks[1].start(*recv(b, ANY, tag=1)),
        ranks[1].start(*recv(c, 0, tag=1)),
        ranks[1].start(*recv(d, ANY, tag=1)),
    ]
    for value in range(4):
        assert ranks[0].run(*send(number(value + 1), 1, tag=1)) is None
    assert all(ticket.wait(60.0) for ticket in tickets)
    assert [int(x[0]) for x in (a, b, c, d)] == [1, 2, 3, 4]
    assert [ticket.source for ticket in tickets] == [0] * 4


def test_an_earlier_message_goes_to_the_receive_that_waits_for_its_sender(ranks):
    """A receive from any rank then takes the next one, though it lies in the stash."""
    assert ranks[0].run(*send(number(1), 1, tag=1)) is None  # stays in its ring
    assert ranks[2].run(*send(number(2), 1, tag=1)) is None
    assert ranks[2].run(*send(number(9), 1, tag=8)) is None
    assert ranks[1].run(*recv(number(0), 2, tag=8)) is None  # stashes rank 2's first
    named, unnamed = number(0), number(0)
    tickets = [
        ranks[1].start(*recv(named, 0, tag=1)),
        ranks[1].start(*recv(unnamed, ANY, tag=1)),
    ]
    assert all(ticket.wait(60.0) for ticket in tickets)
    assert (named[0], unnamed[0]) == (1, 2)
    assert [ticket.source for ticket in tickets] == [0, 2]


def test_large_messages_of_all_ranks_reach_receives_from_any(ranks):
    sent = [
        ranks[sender].start(*send(number(sender * 10 + turn, LARGE), 1, tag=1))
        for turn in range(3)
        for sender in (0, 2)
    ]
    seen = {0: [], 2: []}
    for _ in range(6):
        got = number(-1, LARGE)
        ticket = ranks[1].start(*recv(got, ANY, tag=1))
        assert ticket.wait(60.0)
        assert (got == got[0]).all()
        seen[ticket.source].append(int(got[0]) - ticket.source * 10)
    assert seen == {0: [0, 1, 2], 2: [0, 1, 2]}, "in order per sender"
    assert all(ticket.wait(60.0) for ticket in sent)


def test_each_receive_has_its_own_deadline(ranks):
    """Though one with a longer limit was posted before it."""
    ranks[1].start(*recv(number(0), 0, tag=1, timeout_s=FOREVER_S))
    short = ranks[1].start(*recv(number(0), 0, tag=2, timeout_s=0.5))
    assert short.wait(30.0)
    assert short.fault[:2] == (Fault.TIMED_OUT, [0])


def test_each_send_has_its_own_deadline(ranks):
    ranks[1].start(*send(number(0, LARGE), 0, tag=1, timeout_s=FOREVER_S))
    short = ranks[1].start(*send(number(0), 0, tag=2, timeout_s=0.5))
    assert short.wait(30.0)
    assert short.fault[:2] == (Fault.TIMED_OUT, [0])


def test_a_receive_from_any_rank_times_out_and_names_all_others(ranks):
    ticket = ranks[1].start(*recv(number(0), ANY, timeout_s=0.5))
    assert ticket.wait(30.0)
    assert ticket.fault[:2] == (Fault.TIMED_OUT, [0, 2])


def test_a_receive_from_any_rank_waits_while_one_rank_stays(ranks):
    got = number(0)
    ticket = ranks[1].start(*recv(got, ANY))
    ranks[0].close()
    assert not ticket.wait(0.3)
    assert ranks[2].run(*send(number(5), 1)) is None
    assert ticket.wait(60.0)
    assert (got[0], ticket.source) == (5, 2)
    last = ranks[1].start(*recv(got, ANY))
    ranks[2].close()
    assert last.wait(60.0)
    assert last.fault[:2] == (Fault.PEER_LOST, [0, 2])


def test_a_stream_of_other_messages_does_not_hide_a_deadline(ranks):
    stop = threading.Event()
    ranks[0]

    def flood() -> None:
        while not stop.is_set() and ranks[0].run(*send(number(0, 500), 1, tag=7)) is None:
            pass

    sender = Thread(flood)
    got = number(0, 500)
    late = ranks[1].start(*recv(number(0), 0, tag=5, timeout_s=1.0))
    begun = time.monotonic()
    while not late.done and time.monotonic() - begun < 60:
        ranks[1].run(*recv(got, 0, tag=7, timeout_s=FOREVER_S))
    stop.set()
    sender.join()
    assert late.fault is not None
    assert late.fault[:2] == (Fault.TIMED_OUT, [0])


def test_more_than_64_waiting_operations_are_all_looked_at():
    ranks = Ranks(70)
    others = [rank for rank in range(70) if rank != 0]
    for rank in others[:-1]:
        ranks[0].start(*recv(number(0), rank, timeout_s=FOREVER_S))
    last = ranks[0].start(*recv(number(0), others[-1], timeout_s=0.5))
    assert last.wait(30.0)
    assert last.fault[:2] == (Fault.TIMED_OUT, [69])
    ranks.close()


def test_more_than_64_waiting_operations_are_all_woken():
    ranks = Ranks(70)
    for rank in range(1, 70):
        ranks[0].start(*recv(number(0), rank, timeout_s=FOREVER_S))
    got = number(0)
    for turn in range(50):
        ticket = ranks[0].start(*recv(got, 69, tag=1))
        assert ranks[69].run(*send(number(turn), 0, tag=1)) is None
        assert ticket.wait(60.0)
        assert got[0] == turn
    assert ranks[0].statistics()["lost_wakes"] == 0
    ranks.close()


def test_dtypes_that_travel_as_bytes_are_told_apart():
    names = [
        "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "uint8",
        "int8", "float4_e2m1fn", "datetime64[ns]",
    ]  # fmt: skip
    ids = [native._type_id(Operation("send", 0, dtype=name, peer=0)) for name in names]
    assert len(set(ids)) == len(names)


def _send_another_float8(rank: int, world_size: int) -> None:
    import ml_dtypes

    world = dist.init("shm", timeout_s=60)
    raw = np.zeros(4, np.uint8)
    if rank == 0:
        world.send(raw.view(ml_dtypes.float8_e4m3fn), 1)
        with pytest.raises(CollectiveError):
            world.barrier()
    else:
        with pytest.raises(CollectiveMismatchError, match="differ in dtype"):
            world.recv(raw.view(ml_dtypes.float8_e4m3fnuz), 0)
    dist.shutdown()


@pytest.mark.ranks
def test_a_receive_of_another_float8_is_refused():
    run_ranks(_send_another_float8, 2, environ={"ECHELON_SHM": "native"})


def _send_until_it_fails(world, x) -> None:
    for _ in range(1000):
        world.send(x, 1, tag=7)


def _run_out_of_memory(rank: int, world_size: int) -> None:
    world = dist.init("shm", timeout_s=60)
    x = np.zeros(64 << 20, np.uint8)
    if rank == 0:
        with pytest.raises(CollectiveError, match="rank 1 has no memory left for messages"):
            _send_until_it_fails(world, x)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
        with pytest.raises(CollectiveError, match="rank 1 has no memory left for messages"):
            world.recv(np.zeros(1), 0, tag=5)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.shutdown()


@pytest.mark.ranks
def test_a_stash_without_memory_is_an_error_on_both_ends():
    run_ranks(_run_out_of_memory, 2, timeout_s=60, environ={"ECHELON_SHM": "native"})


def test_operations_name_any_source():
    operation = Operation("recv", 0, dtype="float32", peer=ANY_SOURCE)
    assert operation.is_message
    assert native._root(operation) == ANY
    assert OPERATIONS[-1] == "recv"


def test_a_closed_engine_has_no_calls(ranks):
    assert ranks[0].calls() == []
    ranks[0].close()
    with pytest.raises(ValueError, match="closed"):
        ranks[0].run(*barrier(0))
