"""Signal handlers during a blocked call: they may abort, shut down, exit, and call collectives."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveError
from tests.support.moments import lived_s, once_inside
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

MEANT_S = 2.0
ENGINES = ["native", "python", "gloo", "shm+gloo"]


@pytest.fixture(params=ENGINES)
def engine(request):
    """Run each test on every engine of the host."""
    if "gloo" in request.param:
        pytest.importorskip("torch")
    return request.param


def _init(engine: str, rank: int, timeout_s: float = 600.0):
    if engine in ("native", "python"):
        os.environ["ECHELON_SHM"] = engine
        return dist.init("shm", timeout_s=timeout_s)
    if engine == "shm+gloo":
        levels = importlib.import_module("echelon.dist.backends.two_level")
        levels.host_identity = lambda: {"boot": f"host {rank}"}
    return dist.init(engine, timeout_s=timeout_s)


def _store():
    return importlib.import_module("echelon.dist.runtime")._need().store


def _on_sigterm(handler: Callable[[], object], inside: str = "all_reduce") -> list[float]:
    """Run `handler` at a SIGTERM that arrives inside a call; the list gets its time (`lived_s`)."""
    began: list[float] = []

    def handle(number: int, frame: object) -> None:
        began.append(lived_s())
        handler()

    signal.signal(signal.SIGTERM, handle)
    once_inside(inside, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return began


def _abort(rank: int, world_size: int, engine: str, in_message: bool) -> None:
    world = _init(engine, rank)
    world.barrier()
    if rank == 0:
        began = _on_sigterm(world.abort, "recv" if in_message else "all_reduce")
        with pytest.raises(CollectiveError, match="aborted on rank 0"):
            world.recv(np.ones(3), 1) if in_message else world.all_reduce(np.ones(3))
        assert lived_s() - began[0] < MEANT_S
        _store().set("aborted", "1")
    else:
        _store().get("aborted", timeout=60)
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (0,), str(caught.value)
    dist.shutdown()


@pytest.mark.parametrize("in_message", [False, True])
def test_a_handler_aborts_the_call_it_interrupts(engine, in_message):
    run_ranks(_abort, 2, engine, in_message)


def _exit(rank: int, world_size: int, engine: str) -> None:
    """The usual handler of a job that is about to be preempted."""
    world = _init(engine, rank)
    world.barrier()
    if rank == 0:

        def leave() -> None:
            dist.shutdown()
            sys.exit(3)

        began = _on_sigterm(leave)
        try:
            world.all_reduce(np.ones(3))
        finally:
            assert lived_s() - began[0] < MEANT_S
    else:
        with pytest.raises(CollectiveError) as caught:
            world.recv(np.ones(3), 0)
        assert caught.value.ranks == (0,), str(caught.value)
        dist.shutdown()


def test_a_handler_shuts_down_and_exits(engine):
    run_ranks(_exit, 2, engine, exit_codes={0: 3})


def _shut_down(rank: int, world_size: int, engine: str) -> None:
    world = _init(engine, rank)
    world.barrier()
    if rank == 0:
        began = _on_sigterm(dist.shutdown)
        with pytest.raises(CollectiveError, match="closed on rank 0"):
            world.all_reduce(np.ones(3))
        assert lived_s() - began[0] < MEANT_S
        assert not dist.is_initialized()
    else:
        with pytest.raises(CollectiveError) as caught:
            world.recv(np.ones(3), 0)
        assert caught.value.ranks == (0,), str(caught.value)
        dist.shutdown()


def test_a_handler_shuts_down_and_returns(engine):
    run_ranks(_shut_down, 2, engine)


def _nest(rank: int, world_size: int, engine: str) -> None:
    """A handler of rank 1 calls a collective while the one before waits for rank 0."""
    world = _init(engine, rank, timeout_s=20.0)
    world.barrier()
    store, nests = _store(), world._engine.nests
    x, inner = np.ones(1000), np.ones(2)
    refused: list[str] = []

    def add_more() -> None:
        store.set("in handler", "1")
        try:
            world.all_reduce(inner)
        except CollectiveError as err:
            refused.append(str(err))

    if rank == 1:
        began = _on_sigterm(add_more)
        world.all_reduce(x)
        assert lived_s() - began[0] < MEANT_S
    else:
        store.get("in handler", timeout=60)
        world.all_reduce(x)
        if nests:
            world.all_reduce(inner)
    assert x[0] == world_size
    assert inner[0] == (world_size if nests else 1)
    assert bool(refused) == (rank == 1 and not nests)
    assert all("signal handler" in text for text in refused)
    world.barrier()  # a refused call gets no number: the group goes on
    dist.shutdown()


def test_a_collective_in_a_handler_follows_the_one_it_interrupts_or_is_refused(engine):
    run_ranks(_nest, 2, engine)


class _PreemptedError(Exception):
    pass


def _raise(rank: int, world_size: int, engine: str) -> None:
    world = _init(engine, rank)
    world.barrier()
    if rank == 0:

        def preempt() -> None:
            raise _PreemptedError

        _on_sigterm(preempt)
        with pytest.raises(_PreemptedError):
            world.all_reduce(np.ones(3))
        _store().set("raised", "1")
        with pytest.raises(CollectiveError, match="broken since"):
            world.barrier()
    else:
        _store().get("raised", timeout=60)
        with pytest.raises(CollectiveError) as caught:
            world.all_reduce(np.ones(3))
        assert caught.value.ranks == (0,), str(caught.value)
    dist.shutdown()


def test_what_a_handler_raises_reaches_the_caller_as_it_is(engine):
    run_ranks(_raise, 2, engine)


def _shut_down_in_init(rank: int, world_size: int) -> None:
    began = _on_sigterm(dist.shutdown, "init")
    with pytest.raises(CollectiveError, match="shutdown"):
        dist.init(timeout_s=600)  # rank 1 does not join
    assert lived_s() - began[0] < MEANT_S
    assert not dist.is_initialized()


def test_a_handler_shuts_down_while_init_waits():
    run_ranks(_shut_down_in_init, 2, ranks=[0])
