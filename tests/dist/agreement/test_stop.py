"""A signal to one rank ends the loops of all at the same step; nothing else changes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveTimeoutError, PeerLostError
from tests.support.moments import once_inside
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
LAST = 400


def _me(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def _loop(rank, at, *, reduce=True, skew_s=0.0, ask=_me):
    """Take steps until the ranks stop; the ranks in `at` are signaled in the step it names."""
    world = dist.world()
    x = np.ones(8, np.float32)
    for step in range(LAST if reduce else 100 * LAST):  # no rank ends before a slow one has asked
        if at.get(rank) == step:
            ask()
        if reduce:
            world.all_reduce(x, op="avg")
        if skew_s:
            time.sleep(skew_s * rank)
        if dist.should_stop():
            return step
    return None


def _signaled(rank, world_size, at, reduce, skew_s):
    dist.init(timeout_s=60.0)
    before = signal.getsignal(signal.SIGTERM)
    dist.stop_on_signals()
    stopped = _loop(rank, at, reduce=reduce, skew_s=skew_s)
    again, reason = dist.should_stop(), dist.stop_reason()
    dist.shutdown()
    return stopped, again, reason, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "at", [{0: 3}, {2: 3}, {0: 3, 1: 3, 2: 3}, {1: 2, 2: 5}], ids=["first", "last", "all", "two"]
)
def test_a_signal_to_any_rank_stops_all_ranks_at_the_same_step(at):
    ends = run_ranks(_signaled, 3, at, True, 0.0)
    steps = {end[0] for end in ends}
    assert len(steps) == 1, ends
    assert min(at.values()) <= steps.pop() <= max(at.values()) + 2, ends
    assert all(again and is_restored for _, again, _, is_restored in ends)
    assert {reason for *_, reason, _ in ends} <= {f"rank {rank}: SIGTERM" for rank in at}
    assert len({reason for *_, reason, _ in ends}) == 1


def test_ranks_that_wait_for_nothing_from_each_other_stop_at_the_same_step():
    ends = run_ranks(_signaled, 3, {0: 20}, False, 0.002)
    assert len({end[0] for end in ends}) == 1, ends
    assert ends[0][0] >= 20


def _twice(rank, world_size):
    dist.init(timeout_s=60.0)
    dist.stop_on_signals(signal.SIGTERM, signal.SIGUSR1)

    def ask():
        _me(signal.SIGUSR1)
        _me(signal.SIGUSR1)
        _me()

    stopped = _loop(rank, {1: 4}, ask=ask)
    _me()  # as systemd does to every process, while the rank saves
    x = np.ones(2, np.float32)
    dist.world().all_reduce(x)
    return stopped, x.tolist(), dist.should_stop()


def test_repeated_signals_change_nothing():
    (one, sum_, again), other = run_ranks(_twice, 2)
    assert (one, sum_, again) == other
    assert one in (4, 5)
    assert (sum_, again) == ([2.0, 2.0], True)


def _inside(rank, world_size):
    world = dist.init("shm", timeout_s=60.0)
    store = sys.modules["echelon.dist.runtime"]._need().store
    x = np.ones(2, np.float32)

    def signaled():
        _me()
        store.set("test/signaled", b"1")

    for step in range(LAST):
        if rank == 1 and step == 2:
            once_inside("all_reduce", signaled)
        if rank == 0 and step == 2:
            store.wait(["test/signaled"], timeout=60.0)  # rank 1 waits in its all_reduce
        if not dist.should_stop():
            world.all_reduce(x, op="avg")
            continue
        return step, x.tolist()
    return None


def test_a_signal_during_a_collective_lets_it_end():
    one, other = run_ranks(_inside, 2)
    assert one == other
    assert one[0] in (3, 4)
    assert one[1] == [1.0, 1.0]


def _wished(rank, world_size):
    dist.init(timeout_s=60.0)
    dist.should_stop()

    def ask():
        thread = threading.Thread(target=dist.request_stop, args=("the time is up",))
        thread.start()
        thread.join()

    return _loop(rank, {1: 3}, ask=ask), dist.stop_reason()


def test_a_rank_may_ask_without_a_signal():
    one, other = run_ranks(_wished, 2)
    assert one == other
    assert one[0] in (3, 4)
    assert one[1] == "rank 1: the time is up"


def _worlds(rank, world_size):
    ends = []
    for at in ({0: 1}, {1: 2}):
        dist.init(timeout_s=60.0)
        ends.append(_loop(rank, at))
        dist.shutdown()
    return ends


def test_a_later_world_begins_without_a_stop():
    one, other = run_ranks(_worlds, 2)
    assert one == other
    assert one[0] in (1, 2)
    assert one[1] in (2, 3)


def _dead(rank, world_size):
    world = dist.init(timeout_s=60.0)
    pid = np.array([os.getpid()])
    world.broadcast(pid, root=1)
    other = os.pidfd_open(int(pid[0]))
    dist.should_stop()
    world.barrier()
    if rank == 1:
        _me(signal.SIGKILL)
    select.select([other], [], [])  # until it is dead: before, its thread may agree on a call
    os.close(other)
    _me()
    with pytest.raises(PeerLostError, match="rank 1"):
        all(not dist.should_stop() for _ in range(LAST))
    with pytest.raises(PeerLostError, match="rank 1"):
        dist.should_stop()


def test_a_dead_rank_is_named_instead_of_being_waited_for():
    run_ranks(_dead, 2, exit_codes={1: -signal.SIGKILL})


def _absent(rank, world_size):
    world = dist.init(timeout_s=60.0)
    world.barrier()
    runtime = sys.modules["echelon.dist.runtime"]
    runtime._need().timeout_s = 0.5
    if rank == 0:
        _me_once_taken_over()
        with pytest.raises(CollectiveTimeoutError, match=r"stopping.*missing: 1"):
            dist.should_stop()
    world.barrier()


def _me_once_taken_over():
    dist.stop_on_signals()
    _me()


def test_a_rank_that_never_asks_is_named():
    run_ranks(_absent, 2)


def _forked(rank, world_size):
    dist.init(timeout_s=60.0)
    dist.should_stop()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    os.read(read, 1)
    os.kill(child, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, dist.should_stop()


def test_a_forked_child_ends_by_the_signal_as_ever():
    assert run_ranks(_forked, 1) == [(-signal.SIGTERM, False)]


_ALONE = """
import os, signal, sys
import echelon.dist as dist
dist.init()
if sys.argv[1] == "asks":
    dist.should_stop()
os.kill(os.getpid(), signal.SIGTERM)
assert dist.should_stop() and dist.stop_reason() == "rank 0: SIGTERM"
"""


@pytest.mark.parametrize(("how", "code"), [("asks", 0), ("does not", -signal.SIGTERM)])
def test_a_program_that_does_not_ask_ends_by_sigterm(how, code):
    done = subprocess.run([sys.executable, "-c", _ALONE, how], timeout=300, check=False)
    assert done.returncode == code


_REQUESTS = """
import os, signal
import echelon.dist as dist
dist.init()
dist.request_stop("enough")
while not dist.should_stop():
    pass
os.kill(os.getpid(), signal.SIGTERM)
assert dist.stop_reason() == "rank 0: enough"
"""


def test_a_signal_is_handled_if_the_rank_requested_a_stop_before_it_first_asked():
    done = subprocess.run([sys.executable, "-c", _REQUESTS], timeout=300, check=False)
    assert done.returncode == 0


def test_without_a_world_it_is_refused():
    with pytest.raises(ValueError, match="init"):
        dist.should_stop()


def _aside(rank, world_size):
    dist.init()
    caught = []

    def call():
        try:
            dist.should_stop()
        except ValueError as err:
            caught.append(str(err))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return caught


def test_the_first_call_is_on_the_main_thread():
    ((text,),) = run_ranks(_aside, 1)
    assert "main thread" in text


def _late(rank, world_size):
    world = dist.init(timeout_s=60.0)
    dist.stop_on_signals()
    told = [dist.should_stop() for _ in range(4)]
    world.barrier()
    if rank == 1:
        dist.should_stop()
        dist.shutdown()
        return told  # its process ends
    once_gone = time.monotonic() + 60
    while not world.state.evidence.dead([1]):
        assert time.monotonic() < once_gone
        time.sleep(0.01)
    _me()
    return [*told, dist.should_stop(), dist.should_stop()]


def test_a_signal_after_the_others_last_step_is_no_failure():
    """Rank 1 has answered call 4 with False, so rank 0 does too; the call after it is rank 0's."""
    assert run_ranks(_late, 2) == [[False] * 5 + [True], [False] * 4]
