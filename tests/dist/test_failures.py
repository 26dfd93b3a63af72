"""Ranks that die, leave, freeze or never come: the right error, with their names, in time."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
    StoreTimeoutError,
)
from echelon.store import TCPStore
from tests.support.moments import lived_s, once_inside
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(params=["native", "python"])
def engine(request):
    """Run each test on both engines of the shm backend."""
    return {"ECHELON_SHM": request.param}


BIG = 3_000_000


def _sum_for_ever(world, x) -> None:
    while True:
        world.all_reduce(x, "max")


def _wait_for_death(rank: int, world_size: int, backend: str, num: int) -> None:
    world = dist.init(backend, timeout_s=600)
    x = np.ones(num, np.float32)
    world.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun_s = lived_s()
    with pytest.raises(PeerLostError, match="rank 1 ") as caught:
        world.all_reduce(x)
    assert lived_s() - begun_s < 20, "10 minutes were allowed, 2 s are meant"
    assert caught.value.ranks == (1,), str(caught.value)
    with pytest.raises(CollectiveError, match="broken since"):
        world.barrier()
    dist.shutdown()


def _stop_in_monitored_barrier(rank: int, world_size: int, backend: str) -> None:
    """Rank 1 arrives and is stopped, rank 2 computes: it alone has not arrived."""
    world = dist.init(backend, timeout_s=60)
    world.monitored_barrier()
    store = importlib.import_module("echelon.dist.runtime")._need().store
    pids = world.all_gather_object(os.getpid())
    if rank == 1:
        with contextlib.suppress(CollectiveError):  # it may end, once rank 2 arrives
            world.monitored_barrier()
        store.set("continued", "1")
    elif rank == 2:
        store.get("timed out", timeout=60)
        with contextlib.suppress(CollectiveError):
            world.monitored_barrier()
    else:
        world.state.evidence._store.get("arrived/1/1", timeout=60)
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(CollectiveTimeoutError, match="barrier #") as caught:
                world.monitored_barrier(timeout_s=0.5)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert caught.value.ranks == (2,), caught.value
        store.set("timed out", "1")
        store.get("continued", timeout=60)
    dist.shutdown()


@pytest.mark.slow  # test_evidence.py has the same without oneCCL
def test_a_monitored_barrier_over_oneccl_names_the_rank_that_computes_and_not_one_that_is_stopped():
    reason = next(status.reason for status in registry.statuses() if status.name == "xccl")
    if reason:
        pytest.skip(reason)
    run_ranks(_stop_in_monitored_barrier, 3, "xccl", timeout_s=90)


@pytest.mark.parametrize("num", [1, BIG])
def test_a_killed_rank_is_named_long_before_the_timeout(num, engine):
    run_ranks(_wait_for_death, 4, "shm", num, exit_codes={1: -signal.SIGKILL}, environ=engine)


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo"])
def test_a_killed_rank_is_named_by_backends_with_connections_too(backend):
    pytest.importorskip("torch")
    run_ranks(_wait_for_death_on_hosts, 4, backend, exit_codes={1: -signal.SIGKILL})


def _wait_for_death_on_hosts(rank: int, world_size: int, backend: str) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {rank // 2}"}
    _wait_for_death(rank, world_size, backend, 1000)


def test_a_killed_rank_is_named_though_oneccl_cannot_abort():
    """And the process still ends, with the library stuck in its call."""
    reason = next(status.reason for status in registry.statuses() if status.name == "xccl")
    if reason:
        pytest.skip(reason)
    run_ranks(_wait_for_death, 3, "xccl", 1000, exit_codes={1: -signal.SIGKILL})


def _die_inside(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=600)
    x = np.ones(BIG, np.float32)
    world.barrier()
    if rank == 1:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(PeerLostError, match="rank 1 "):
        _sum_for_ever(world, x)
    dist.shutdown()


def test_a_rank_killed_in_the_middle_of_an_operation_is_named(engine):
    run_ranks(_die_inside, 3, exit_codes={1: -signal.SIGKILL}, environ=engine)


def _wait_for_leaver(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=600)
    world.barrier()
    if rank != 2:
        with pytest.raises(PeerLostError, match="rank 2 ") as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (2,)
    dist.shutdown()


def test_a_rank_that_left_in_order_is_named_at_once(engine):
    run_ranks(_wait_for_leaver, 3, environ=engine)


def _lag_behind_a_failure(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=600)
    store = dist_store()
    if rank == 0:
        python = importlib.import_module("echelon.dist.backends.shm.python")
        check = python.PythonEngine._check_same_call

        def check_late(engine, operation) -> None:
            store.get(f"rank 1 has failed after {operation.kind}", timeout=60)
            check(engine, operation)

        python.PythonEngine._check_same_call = check_late
        store.set("rank 1 has failed after all_reduce", "1")
    world.barrier()
    if rank != 2:
        with pytest.raises(PeerLostError, match="rank 2 ") as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (2,)
    if rank == 1:
        store.set("rank 1 has failed after barrier", "1")
    dist.shutdown()


def test_an_operation_that_all_took_part_in_is_done_though_the_next_has_failed():
    """On the Python engine; `tests/native/endings.c` has the same for the C core."""
    run_ranks(_lag_behind_a_failure, 3, environ={"ECHELON_SHM": "python"})


def _wait_for_late(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=60)
    world.barrier()
    world.timeout_s = 1.0
    if rank == 1:
        # Comes only when the others have given up: their store key says so.
        dist_store().get("gave-up-0", timeout=60)
        dist_store().get("gave-up-2", timeout=60)
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (1,), str(caught.value)
    else:
        with pytest.raises(CollectiveTimeoutError, match=r"missing: 1\b") as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (1,), str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        dist_store().set(f"gave-up-{rank}", "1")
    dist.shutdown()


def dist_store():
    return importlib.import_module("echelon.dist.runtime")._need().store


def test_a_late_rank_is_missing_after_the_timeout_and_told_so_when_it_comes(engine):
    run_ranks(_wait_for_late, 3, environ=engine)


def _give_up_first(rank: int, world_size: int, how: str) -> None:
    """Rank 0 gives up while rank 1 is late; rank 2, with a longer limit, hears of it at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world = dist.init(timeout_s=600)
    world.barrier()
    if rank == 2:
        once_inside("all_reduce", lambda: dist_store().set("rank 2 waits", "1"))
    if rank == 0:
        dist_store().get("rank 2 waits", timeout=60)
        if how == "timeout":
            world.timeout_s = 0.5
        else:
            once_inside("all_reduce", lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(CollectiveTimeoutError if how == "timeout" else KeyboardInterrupt):
            world.all_reduce(np.ones(3))
    else:
        if rank == 1:  # comes only once rank 2 has heard
            dist_store().get("rank 2 has failed", timeout=60)
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == ((1,) if how == "timeout" else (0,)), str(caught.value)
        dist_store().set(f"rank {rank} has failed", "1")
    dist.shutdown()


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_a_rank_that_waits_for_a_late_one_hears_that_another_has_given_up(engine, how):
    run_ranks(_give_up_first, 3, how, environ=engine)


def _wait_for_stopped(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=60)
    store = dist_store()
    store.set(f"pid-{rank}", str(os.getpid()))
    pid = int(store.get("pid-1"))
    if rank == 1:
        with contextlib.suppress(CollectiveError):  # frozen in here by rank 0, woken in the end
            world.barrier()
            _sum_for_ever(world, np.ones(3))
        return
    world.barrier()
    world.timeout_s = 1.5
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CollectiveTimeoutError, match=r"missing: 1\b") as caught:
            _sum_for_ever(world, np.ones(3))
        assert caught.value.ranks == (1,), str(caught.value)
        store.set(f"saw-{rank}", "1")
        store.wait([f"saw-{r}" for r in range(world_size) if r != 1], timeout=60)
    finally:
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
    dist.shutdown()


def test_a_frozen_rank_is_missing_after_the_timeout(engine):
    run_ranks(_wait_for_stopped, 3, environ=engine)


def _wait_for_missing(rank: int, world_size: int, backend: str) -> None:
    with TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=60) as store:
        store.barrier("about to join", 2)  # else the first to come might miss the second
    with pytest.raises(CollectiveTimeoutError, match="missing: 1, 3") as caught:
        dist.init(backend, timeout_s=4)  # for two ranks to meet on a busy machine
    assert caught.value.ranks == (1, 3)
    dist.shutdown()


def test_init_names_the_ranks_that_never_come(engine):
    run_ranks(_wait_for_missing, 4, "shm", ranks=[0, 2], environ=engine)


def _stay_away(rank: int, world_size: int, backend: str, in_message: bool) -> None:
    """Rank 0 waits and is interrupted; rank 1 comes afterwards and hears about it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    world = dist.init(backend, timeout_s=600)
    world.barrier()
    if rank == 0:
        name = "recv" if in_message else "all_reduce"
        timer = once_inside(name, lambda: os.kill(os.getpid(), signal.SIGINT))
        begun_s = lived_s()
        with pytest.raises(KeyboardInterrupt):
            world.recv(np.ones(3), 1) if in_message else world.all_reduce(np.ones(3))
        assert lived_s() - begun_s < 20, "10 minutes were allowed, 0.1 s are meant"
        timer.join()
        dist_store().set("interrupted", "1")
    else:
        dist_store().get("interrupted", timeout=60)
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (0,)
    dist.shutdown()


@pytest.mark.parametrize("in_message", [False, True])
def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(engine, in_message):
    run_ranks(_stay_away, 2, "shm", in_message, environ=engine)


@pytest.mark.parametrize("in_message", [False, True])
def test_ctrl_c_ends_a_wait_on_a_connection_too(in_message):
    pytest.importorskip("torch")
    run_ranks(_stay_away, 2, "gloo", in_message)


def _abort(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=600)
    world.barrier()
    if rank == 0:
        timer = once_inside("all_reduce", world.abort)
        with pytest.raises(CollectiveError, match="aborted on rank 0"):
            world.all_reduce(np.ones(3))  # rank 1 does not come: it waits for us elsewhere
        timer.join()
    else:
        works = [world.recv(np.ones(3), 0, tag=tag, async_op=True) for tag in (1, 2)]
        for work in works:
            with pytest.raises(PeerLostError) as caught:
                work.wait(timeout_s=30)
            assert caught.value.ranks == (0,)
    with pytest.raises(CollectiveError):
        world.barrier()
    dist.shutdown()


def test_a_group_is_aborted_from_another_thread_on_all_ranks(engine):
    run_ranks(_abort, 2, "shm", environ=engine)


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo"])
def test_a_group_on_connections_is_aborted_while_messages_wait(backend):
    pytest.importorskip("torch")
    run_ranks(_abort_on_hosts, 2, backend)


def _abort_on_hosts(rank: int, world_size: int, backend: str) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {rank}"}
    _abort(rank, world_size, backend)


def _shut_down_in_flight(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=600)
    world.barrier()
    out = np.zeros(100_000)
    if rank == 0:
        work = world.recv(out, 1, async_op=True)  # never sent
        dist.shutdown()
        with pytest.raises(CollectiveError):
            work.wait(timeout_s=20)
        assert work.done
    else:
        dist.shutdown()


def test_shutdown_ends_what_is_in_flight(engine):
    run_ranks(_shut_down_in_flight, 2, environ=engine)


def _end_a_swap(rank: int, world_size: int, end: str) -> None:
    """Two ranks exchange large arrays; rank 1 is frozen or dies in there."""
    world = dist.init("gloo", timeout_s=600)
    store, x = dist_store(), np.ones(BIG, np.float32)
    store.set(f"pid-{rank}", str(os.getpid()))
    peer = int(store.get("pid-1"))
    world.all_reduce(x)
    if rank == 1:
        with contextlib.suppress(CollectiveError):
            _sum_for_ever(world, x)
        dist.shutdown()
        return
    ends = {
        "kill": (lambda: os.kill(peer, signal.SIGKILL), PeerLostError, "rank 1 "),
        "timeout": (lambda: None, CollectiveTimeoutError, r"missing: 1\b"),
        "abort": (world.abort, CollectiveError, "aborted on rank 0"),
        "ctrl-c": (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt, ""),
    }
    act, error, text = ends[end]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    if end == "timeout":
        world.timeout_s = 1.5
    if end != "kill":
        threading.Timer(0.1, lambda: os.kill(peer, signal.SIGSTOP)).start()
    timer = threading.Timer(0.4, act)
    timer.start()
    begun_s = lived_s()
    try:
        with pytest.raises(error, match=text):
            _sum_for_ever(world, x)
        assert lived_s() - begun_s < 20
        timer.join()
        dist.shutdown()
    finally:
        if end != "kill":
            os.kill(peer, signal.SIGCONT)


@pytest.mark.parametrize("end", ["kill", "timeout", "abort", "ctrl-c"])
def test_two_ranks_that_swap_are_ended_like_any_others(end):
    pytest.importorskip("torch")
    run_ranks(_end_a_swap, 2, end, exit_codes={1: -signal.SIGKILL} if end == "kill" else None)


def _come_after_the_limit_of_init(rank: int, world_size: int) -> None:
    world = dist.init("gloo", timeout_s=4.0)
    world.timeout_s = 60.0
    if rank == 1:
        with pytest.raises(StoreTimeoutError):
            dist_store().get("never", timeout=5.0)
    x = np.ones(BIG, np.float32)
    world.all_reduce(x)
    assert x[0] == x[-1] == world_size
    dist.shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_operation_may_take_longer_than_init_could(world_size):
    pytest.importorskip("torch")
    run_ranks(_come_after_the_limit_of_init, world_size)
