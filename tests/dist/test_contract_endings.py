"""How groups end, on every engine: who is named, how long it takes, and what remains.

Each rank runs all cases of an engine in one process; every case has a group of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError
from tests.dist.contract import store_of_world, wait_until
from tests.support.moments import lived_s
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_ABORT_S = 2.0  # it does local work only, of at most 1 s; the rest is for a busy machine
_NOTICE_S = 20.0  # an engine looks every 0.1 s; asking who is gone may take 2 s

ENGINES = ["native", "python", "gloo", "shm+gloo", "xccl"]


def _run(fn: Callable[..., Any], engine: str, world_size: int, *args: Any) -> list[Any]:
    backend = "shm" if engine in ("native", "python") else engine
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(reason)
    environ = {"ECHELON_SHM": engine} if backend == "shm" else {}
    return run_ranks(fn, world_size, backend, *args, environ=environ, timeout_s=150)


def _init(rank: int, world_size: int, backend: str) -> Any:
    if backend == "shm+gloo":
        two_level = importlib.import_module("echelon.dist.backends.two_level")
        two_level.host_identity = lambda: {"boot": f"host {rank * 2 // world_size}"}
    return dist.init(backend, timeout_s=60)


# ---- a rank that never calls ----


def _miss_a_barrier(world: Any) -> None:
    rank, world_size = world.rank, world.size
    group = dist.new_group(range(world_size), name="missed")
    group.monitored_barrier(30)
    store, late = store_of_world(), world_size - 1
    if rank == late:
        store.wait([f"named/{other}" for other in range(late)], timeout=60)
    else:
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.monitored_barrier(1.0)
        assert caught.value.ranks == (late,), caught.value
        assert f"missing: {late}" in str(caught.value)
        store.set_confirmed(f"named/{rank}", "1")


# ---- abort and close ----


def _abort_from_a_thread(world: Any) -> None:
    rank, world_size = world.rank, world.size
    group = dist.new_group(range(world_size), name="aborted")
    store = store_of_world()
    names = [f"waits/{other}" for other in range(1, world_size)]
    if rank == 0:
        store.wait(names, timeout=60)
        begun_s = lived_s()
        group.abort()
        assert lived_s() - begun_s < _ABORT_S
        with pytest.raises(CollectiveError):
            group.barrier()
    else:
        work = group.all_reduce(np.ones(1000), async_op=True)
        assert not work.done
        store.set(names[rank - 1], "1")
        begun_s = lived_s()
        with pytest.raises(CollectiveError) as caught:
            work.wait(timeout_s=50)
        assert lived_s() - begun_s < _NOTICE_S
        assert not isinstance(caught.value, CollectiveTimeoutError)
        assert caught.value.ranks == (0,), caught.value


def _close_from_a_thread(world: Any) -> None:
    rank, world_size = world.rank, world.size
    group = dist.new_group(range(world_size), name="closed")
    world.barrier()  # a rank that still connects to this one would see a connection that broke
    seen: list[BaseException] = []

    def call() -> None:
        try:
            group.all_reduce(np.ones(1000))
        except BaseException as err:  # noqa: BLE001 -- the test looks at it
            seen.append(err)

    store = store_of_world()
    if rank == 0:
        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: group.num_collectives == 1, 30)
        begun_s = lived_s()
        group.close()
        assert lived_s() - begun_s < _ABORT_S
        thread.join(30)
        assert not thread.is_alive()
        assert [isinstance(err, CollectiveError) for err in seen] == [True], seen
        with pytest.raises(ValueError, match="shut down"):
            group.barrier()
        store.set_confirmed("closed", "1")
    store.wait(["closed"], timeout=60)


# ---- the runs: processes cost more than the cases ----


def _end_in_all_ways(rank: int, world_size: int, backend: str) -> None:
    world = _init(rank, world_size, backend)
    for case in (_miss_a_barrier, _abort_from_a_thread, _close_from_a_thread):
        case(world)
        world.barrier()
    dist.shutdown()


@pytest.mark.parametrize("engine", ENGINES[:-1])
def test_a_missing_rank_is_named_and_abort_and_close_end_what_waits(engine):
    _run(_end_in_all_ways, engine, 4 if engine == "shm+gloo" else 3)


_OF_XCCL = {
    "missing": _miss_a_barrier,
    "abort": _abort_from_a_thread,
    "close": _close_from_a_thread,
}


def _end_in_one_way(rank: int, world_size: int, backend: str, name: str) -> None:
    _OF_XCCL[name](_init(rank, world_size, backend))
    dist.shutdown()


# oneCCL cannot end a call, and the process has no second one: each case has processes of its own.
@pytest.mark.parametrize(
    "name", [pytest.param("missing", marks=pytest.mark.slow), "abort", "close"]
)
def test_a_missing_rank_is_named_and_abort_and_close_end_what_waits_over_oneccl(name):
    _run(_end_in_one_way, "xccl", 3, name)


# ---- what remains ----


def _held() -> tuple[list[str], list[str]]:
    """Return the threads of this process, of any language, and its descriptors."""
    threads, descriptors = [], []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            threads.append((path / "comm").read_text().strip())
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.append(str(path.readlink()))
    return sorted(threads), sorted(descriptors)


def _use(group: Any, *, fails: bool, closes: bool = True) -> None:
    rank, size = group.rank, group.size
    x = np.ones(100_000, np.float32)
    group.all_reduce(x, async_op=True).wait()
    work = group.send(x, (rank + 1) % size, async_op=True)
    group.recv(x, (rank - 1) % size)
    work.wait()
    if fails:
        with pytest.raises(CollectiveMismatchError):
            group.all_reduce(x[: rank + 1])
    if closes:
        group.close()


# Threads and descriptors that a failed group keeps until the process ends: Gloo's connections are
# never destroyed once they broke, since their destructor may wait indefinitely, and oneCCL cannot
# abort. `shm+gloo` has two meshes of connections.
_KEPT_AFTER_FAILURE = {"shm": (0, 0), "gloo": (3, 8), "shm+gloo": (6, 16), "xccl": (3, 8)}


# Where the making of a group fails, on all its ranks: after something that has to be released.
_HALF_WAY = {
    "native": [
        "backends.shm.rendezvous._prove_shared",
        "backends.shm.native.NativeEngine.__init__",
    ],
    "python": ["backends.shm.rendezvous._descriptor", "backends.shm.python.Segment.__init__"],
}


def _fail_half_way(world: Any, engine: str) -> None:
    """Make groups whose making fails at each of an engine's places."""
    for place in [*_HALF_WAY[engine], "make_group.ChannelTags.__init__"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"echelon.dist.{place}", _raise_half_way)
            with pytest.raises(RuntimeError, match="half way"):
                dist.new_group(range(world.size), name="half made")
        world.barrier()


def _raise_half_way(*_: object, **__: object) -> None:
    """Fail once all ranks are here: none waits in a library for one that has given up."""
    store_of_world().barrier("half way", dist.world().size, timeout=60)
    raise RuntimeError("half way")


def _leave_nothing_half_made(world: Any, engine: str) -> None:
    _fail_half_way(world, engine)
    before = _settled()
    for _ in range(3):
        _fail_half_way(world, engine)
    _expect(_counts(before))


def _expect(most: list[int]) -> None:
    """Wait until this process holds so many threads and descriptors at most."""
    deadline_s = time.monotonic() + 20
    while any(now > limit for now, limit in zip(_counts(_held()), most, strict=True)):
        assert time.monotonic() < deadline_s, f"at most {most} were expected: {_held()}"
        threading.Event().wait(0.02)


def _forget_groups(world: Any, *, keeps_dropped: bool) -> None:
    """A closed group is forgotten, and one that its user drops is closed."""
    world.barrier()  # the world has its own thread from now on
    before = _settled()
    for is_closed in (True, False):
        group = dist.new_group(range(world.size), name="forgotten")
        seen = weakref.ref(group)
        _use(group, fails=False, closes=is_closed)
        world.barrier()
        del group
        gc.collect()
        assert seen() is None
    if not keeps_dropped:
        _expect(_counts(before))


def _counts(held: tuple[list[str], list[str]]) -> list[int]:
    return [len(one) for one in held]


def _leave_nothing(rank: int, world_size: int, backend: str, engine: str) -> None:
    world = _init(rank, world_size, backend)
    if backend == "shm":  # elsewhere a rank may wait in the library for one that has given up
        _leave_nothing_half_made(world, engine)
    _forget_groups(world, keeps_dropped=backend == "xccl")
    for fails in (False, True):
        before = ([], [])
        for number in range(4):
            _use(dist.new_group(range(world_size), name=f"{fails}{number}"), fails=fails)
            world.barrier()
            if number == 0:
                before = _settled()  # libraries have started what they keep
        after = _settled()
        kept = _KEPT_AFTER_FAILURE[backend] if fails else (0, 0)
        for kind, once, now, more in zip(("threads", "fds"), before, after, kept, strict=True):
            assert len(now) <= len(once) + 3 * more, f"{kind}: {now} after, {once} before"
    dist.shutdown()


def _settled() -> tuple[list[str], list[str]]:
    """Return what this process holds once it has not changed for a while."""
    seen, since_s = _held(), time.monotonic()
    deadline_s = since_s + 20
    while time.monotonic() < min(since_s + 0.5, deadline_s):
        now = _held()
        if _counts(now) != _counts(seen):
            seen, since_s = now, time.monotonic()
        threading.Event().wait(0.02)
    return seen


@pytest.mark.parametrize("engine", ENGINES)
def test_closed_groups_leave_no_thread_and_no_descriptor(engine):
    """Neither do groups that failed, beyond what their library cannot release, groups that were
    dropped, and groups whose making failed half way."""
    _run(_leave_nothing, engine, 4 if engine == "shm+gloo" else 2, engine)
