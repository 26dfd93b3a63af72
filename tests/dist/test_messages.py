"""Messages, channels and the threads below them, on every engine of the host."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from tests.support.moments import lived_s, once_inside
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ENGINES = [("shm", "native"), ("shm", "python"), ("gloo", "native"), ("shm+gloo", "native")]
OURS = ENGINES[1:]
ACROSS = [("gloo", "native"), ("shm+gloo", "native"), ("shm+gloo", "python")]


def run(fn, world_size, backend, engine, *args, **options):
    """Run ranks on one engine; "shm+gloo" believes that there are two ranks per host."""
    if backend != "shm":
        pytest.importorskip("torch")
    return run_ranks(
        _on_hosts, world_size, fn, backend, *args, environ={"ECHELON_SHM": engine}, **options
    )


def _on_hosts(rank, world_size, fn, backend, *args):
    levels = importlib.import_module("echelon.dist.backends.two_level")
    levels.host_identity = lambda: {"boot": f"host {rank // 2}"}
    return fn(rank, world_size, backend, *args)


def _store():
    return importlib.import_module("echelon.dist.runtime")._need().store


# ---- order ----


def _take_in_the_other_order(rank: int, world_size: int, backend: str, size: int) -> None:
    world = dist.init(backend, timeout_s=20)
    last = world_size - 1  # on another host than rank 0
    if rank == 0:
        works = [
            world.send(np.full(size, float(tag)), last, tag=tag, async_op=True) for tag in (5, 9)
        ]
        for work in works:
            work.wait()
    elif rank == last:
        for tag in (9, 5):
            x = np.zeros(size)
            world.recv(x, 0, tag=tag)
            assert (x == tag).all()
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
@pytest.mark.parametrize("size", [10, 500_000])
def test_sends_of_two_tags_are_received_in_the_other_order(backend, engine, size):
    run(_take_in_the_other_order, 4 if backend == "shm+gloo" else 2, backend, engine, size)


def _flood(rank: int, world_size: int, backend: str, num: int) -> int:
    world = dist.init(backend, timeout_s=200)
    numbers = np.arange(num, dtype=np.int64)
    wrong = 0
    if rank == 0:
        for i in range(num):
            world.send(numbers[i : i + 1], 1, tag=7)
        world.send(numbers[-1:], 1, tag=5)
    else:
        answer, got = np.zeros(1, np.int64), np.full(1, -1, np.int64)
        late = world.recv(answer, 0, tag=5, async_op=True)
        for i in range(num):
            world.recv(got, 0, tag=7, async_op=True).wait()
            wrong += int(got[0]) != i
        late.wait()
        assert answer[0] == num - 1
    dist.shutdown()
    return wrong


@pytest.mark.parametrize(("backend", "engine"), [("shm", "python"), ("gloo", "native")])
@pytest.mark.parametrize(
    ("num", "turns"), [(3000, 1), pytest.param(60_000, 20, marks=pytest.mark.slow)]
)
def test_a_flood_of_one_tag_stays_in_order_while_another_tag_is_awaited(
    backend, engine, num, turns
):
    for turn in range(turns):
        found = run(_flood, 2, backend, engine, num, timeout_s=300)
        assert found == [0, 0], f"flood {turn}"


def _mix(rank: int, world_size: int, backend: str, seed: int) -> None:
    """Carry out a random schedule that all ranks draw alike: messages, channels and collectives."""
    world = dist.init(backend, timeout_s=60)
    chance = random.Random(seed)
    works, expected = [], []
    for number in range(120):
        if chance.random() < 0.1:
            x = np.full(chance.choice((1, 50_000)), float(rank))
            works.append(world.all_reduce(x, async_op=True))
            expected.append((x, np.full_like(x, sum(range(world_size)))))
            continue
        sender, receiver = chance.sample(range(world_size), 2)
        tag, size = chance.randrange(3), chance.choice((0, 1, 1000, 40_000, 300_000))
        named = chance.random() < 0.3
        data = np.random.default_rng(seed * 1000 + number).integers(0, 99, size)
        if rank == sender:
            lane = world.channel(receiver, f"lane {tag}") if named else None
            works.append(
                lane.send(data, async_op=True)
                if lane
                else world.send(data, receiver, tag=tag, async_op=True)
            )
            expected.append((data, data.copy()))
        elif rank == receiver:
            out = np.zeros(size, np.int64)
            lane = world.channel(sender, f"lane {tag}") if named else None
            works.append(
                lane.recv(out, async_op=True)
                if lane
                else world.recv(out, sender, tag=tag, async_op=True)
            )
            expected.append((out, data))
    order = list(range(len(works)))
    random.Random(seed * 31 + rank).shuffle(order)
    for number in order:
        works[number].wait(timeout_s=60)
    assert all((out == data).all() for out, data in expected)
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))]
)
def test_random_schedules_give_every_receive_its_message(backend, engine, seed):
    world_size = 4 if backend == "shm+gloo" else 2 + seed % 4
    run(_mix, world_size, backend, engine, seed, timeout_s=120)


# ---- any source, dtypes ----


def _from_any(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=30)
    if rank == 0:
        found = []
        for _ in range(2 * (world_size - 1)):
            x = np.zeros(1000, np.int64)
            source = world.recv(x, None, tag=3)
            assert (x // 10 == source).all()
            found.append((source, int(x[0] % 10)))
        assert sorted(found) == [(r, n) for r in range(1, world_size) for n in range(2)]
        assert all(found.index((r, 0)) < found.index((r, 1)) for r in range(1, world_size))
    else:
        for number in range(2):
            world.send(np.full(1000, 10 * rank + number), 0, tag=3)
    world.barrier()
    dist.shutdown()


BOTH_LEVELS = [("shm+gloo", "native"), ("shm+gloo", "python")]


@pytest.mark.parametrize(("backend", "engine"), [*ENGINES, BOTH_LEVELS[1]])
def test_a_receive_from_any_rank_returns_the_sender(backend, engine):
    run(_from_any, 4, backend, engine)


def _take_all(rank: int, world_size: int, backend: str) -> None:
    """Receives posted before and after their messages, of all sizes, named ones among them."""
    world = dist.init(backend, timeout_s=60)
    draw = random.Random(5)  # the same on all ranks
    num, sizes = 120, [draw.choice((1, 100, 50_000, 300_000)) for _ in range(40)]
    tag_of = [draw.randrange(3) for _ in range(num)]
    size_of = [sizes[tag] for tag in tag_of]  # of one tag all are equal: any may come
    if rank == 0:
        named = [world.recv(np.zeros(10, np.int64), source, 7, True) for source in (3, 1, 2)]
        outs = [np.full(size, -1, np.int64) for size in size_of]
        late = draw.sample(range(num), num // 2)
        early = [index for index in range(num) if index not in late]
        works = {}
        for index in early:
            works[index] = world.recv(outs[index], None, tag_of[index], async_op=True)
        _store().set("posted", "1")
        for index in late:
            works[index] = world.recv(outs[index], None, tag_of[index], async_op=True)
            if index % 3 == 0:
                works[index].wait()
        found: dict[tuple[int, int], list[int]] = {}
        for index in [*early, *late]:
            works[index].wait()
            source, number = divmod(int(outs[index][0]), 1000)
            assert (outs[index] == outs[index][0]).all()
            assert works[index].source == source
            found.setdefault((source, tag_of[index]), []).append(number)
        assert sum(map(len, found.values())) == num
        assert all(numbers == sorted(numbers) for numbers in found.values()), "out of order"
        for work in named:
            work.wait()
    else:
        works = []
        for index in range(num):
            if index == num // 2:
                _store().get("posted", timeout=60)
            if index % 3 == rank - 1:
                value = np.full(size_of[index], 1000 * rank + index)
                works.append(world.send(value, 0, tag_of[index], async_op=True))
        for work in works:
            work.wait()
        world.send(np.zeros(10, np.int64), 0, 7)
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), [*ENGINES[:3], *BOTH_LEVELS])
def test_receives_from_any_rank_lose_and_confuse_no_message(backend, engine):
    run(_take_all, 4, backend, engine, timeout_s=90)


def _take_what_is_left(rank: int, world_size: int, backend: str) -> None:
    """A rank of the own host leaves: one of another host may send yet; then no rank does."""
    world = dist.init(backend, timeout_s=30)
    x = np.zeros(3)
    if rank == 0:
        work = world.recv(x, None, tag=3, async_op=True)
        _store().get("left", timeout=60)
        _store().set("seen", "1")
        work.wait()
        assert (work.source, x[0]) == (3, 7)
        with pytest.raises(PeerLostError, match=r"recv #1 from any rank .* rank 1 died or left"):
            world.recv(x, None, tag=3, timeout_s=0.5)
        _store().set("gave up", "1")
    elif rank == 1:
        world.close()
        _store().set("left", "1")
    elif rank == 3:
        _store().get("seen", timeout=60)
        time.sleep(0.3)  # for the core to notice that rank 1 has left
        world.send(np.full(3, 7.0), 0, tag=3)
    _store().get("gave up", timeout=60)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), BOTH_LEVELS)
def test_a_receive_from_any_rank_waits_for_other_hosts_when_its_own_is_empty(backend, engine):
    run(_take_what_is_left, 4, backend, engine, timeout_s=60)


def _long_dtype(rank: int, world_size: int, backend: str) -> None:
    import ml_dtypes

    world = dist.init(backend, timeout_s=30)
    x = np.arange(16, dtype=np.uint8).view(ml_dtypes.float8_e4m3b11fnuz)
    if rank == 0:
        world.send(x, 1)
        world.send(x, 1)
    else:
        out = np.zeros_like(x)
        world.recv(out, 0)
        assert out.tobytes() == x.tobytes()
        with pytest.raises(CollectiveError, match="differ in dtype or size"):
            world.recv(out.view(ml_dtypes.float8_e4m3fnuz), 0)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), OURS[:2])
def test_a_dtype_with_a_long_name_is_carried_and_compared_whole(backend, engine):
    run(_long_dtype, 2, backend, engine)


# ---- channels ----


def _use_channels(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=30)
    peer = world_size - 1 - rank
    if rank in (0, world_size - 1):
        names = ["activations", "grads", "x" * 300, "grads "]
        if rank == 0:
            names.reverse()
        lanes = {name: world.channel(peer, name) for name in names}
        assert len({lane._tag for lane in lanes.values()}) == len(names)
        for lane in lanes.values():
            lane.open(np.zeros(1))  # the host's messages need no connection of their own
        stuck = world.channel(peer, "never answered")
        never = stuck.recv(np.zeros(1), async_op=True)
        outs = {name: [np.zeros(3000, np.int64) for _ in range(4)] for name in lanes}
        works = [
            lane.recv(out, async_op=True) for name, lane in lanes.items() for out in outs[name]
        ]
        for number in range(4):
            for name, lane in lanes.items():
                value = 10 * len(name) + number
                works.append(lane.send(np.full(3000, value), async_op=True))
        world.send(np.ones(1), peer, tag=0)
        world.recv(np.zeros(1), peer, tag=0)
        for work in works:
            work.wait(timeout_s=20)
        for name, received in outs.items():
            assert [int(out[0]) for out in received] == [10 * len(name) + n for n in range(4)]
        assert not never.done
        for bad in (rank, world_size, "x"):
            with pytest.raises((ValueError, TypeError)):
                world.channel(bad, "name")
        with pytest.raises(ValueError, match="needs a name"):
            world.channel(peer, "")
        assert "activations" in repr(lanes["activations"])
    x = np.ones(5)
    world.all_reduce(x)
    assert x[0] == world_size
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
def test_channels_are_in_order_and_independent_of_everything_else(backend, engine):
    run(_use_channels, 4 if backend == "shm+gloo" else 2, backend, engine)


# ---- threads, deadlines, the end ----


def _use_many_tags(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=60)
    world.barrier()
    before = threading.active_count()
    outs = [np.zeros(1, np.int64) for _ in range(300)]
    if rank == 0:
        works = [world.recv(out, 1, tag=tag, async_op=True) for tag, out in enumerate(outs)]
        assert threading.active_count() <= before + 4
        _store().set("posted", "1")
        for work in works:
            work.wait()
        assert [int(out[0]) for out in outs] == list(range(300))
        never = [world.recv(out, 1, tag=1000 + tag, async_op=True) for tag, out in enumerate(outs)]
    else:
        _store().get("posted", timeout=60)
        for tag in reversed(range(300)):
            world.send(np.array([tag]), 0, tag=tag)
        never = []
    assert threading.active_count() <= before + 4
    world.barrier()
    if rank == 1:
        _store().get("closed", timeout=60)  # a rank that leaves ends what others need it for
    begun_s = lived_s()
    world.close()
    assert lived_s() - begun_s < 3, "close is bounded, whatever is under way"
    if rank == 0:
        _store().set("closed", "1")
    dist.shutdown()
    for work in never:
        with pytest.raises(CollectiveError):
            work.wait(timeout_s=30)


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
def test_300_tags_need_no_thread_each_and_closing_is_bounded(backend, engine):
    run(_use_many_tags, 2, backend, engine)


def _wait_behind(rank: int, world_size: int, backend: str) -> None:
    """A deadline counts from the call: behind an operation that takes long, too."""
    world = dist.init(backend, timeout_s=30)
    world.barrier()
    if rank == 1:
        _store().get("timed out", timeout=60)
        dist.shutdown()
        return
    first = world.all_reduce(np.ones(3), async_op=True)
    begun_s = lived_s()
    second = world.all_reduce(np.ones(3), async_op=True, timeout_s=0.5)
    with pytest.raises(CollectiveTimeoutError):
        second.wait(timeout_s=20)
    assert lived_s() - begun_s < 10
    _store().set("timed out", "1")
    with pytest.raises(CollectiveError):
        first.wait(timeout_s=20)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), [("shm", "python"), ("gloo", "native")])
def test_a_deadline_counts_from_the_call_though_another_operation_is_first(backend, engine):
    run(_wait_behind, 2, backend, engine)


def _receive_with_two_limits(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=60)
    world.barrier()
    if rank == 1:
        _store().get("timed out", timeout=60)
        dist.shutdown()
        return
    world.recv(np.ones(3), 1, tag=1, async_op=True)
    begun_s = lived_s()
    with pytest.raises(CollectiveTimeoutError) as caught:
        world.recv(np.ones(3), 1, tag=2, timeout_s=0.5)
    assert lived_s() - begun_s < 10
    assert caught.value.ranks == (1,)
    _store().set("timed out", "1")
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
def test_a_receive_with_a_shorter_limit_does_not_wait_for_a_longer_one(backend, engine):
    run(_receive_with_two_limits, 2, backend, engine)


def _close_under(rank: int, world_size: int, backend: str, call: str) -> None:
    world = dist.init(backend, timeout_s=60)
    world.barrier()
    if rank == 1:
        _store().get("closed", timeout=60)
        dist.shutdown()
        return
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            world.recv(np.ones(3), 1) if call == "recv" else world.all_reduce(np.ones(3))
        except BaseException as err:  # noqa: BLE001 -- looked at below
            seen.append(err)

    thread = threading.Thread(target=wait)
    thread.start()
    while not world._state._inside:
        time.sleep(0.001)
    begun_s = lived_s()
    world.close()
    thread.join(30)
    assert not thread.is_alive()
    assert lived_s() - begun_s < 3
    assert [type(err) for err in seen] == [CollectiveError], seen
    assert "closed" in str(seen[0])
    _store().set("closed", "1")
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), OURS)
@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_closing_from_another_thread_ends_a_call_with_an_error_of_ours(backend, engine, call):
    run(_close_under, 2, backend, engine, call)


# ---- faults ----


def _exchange_without_end(world, rank: int, world_size: int) -> None:
    others = [r for r in range(world_size) if r != rank]
    big = np.zeros(1_000_000)
    while True:
        works = [world.recv(np.zeros(1_000_000), r, tag=1, async_op=True) for r in others]
        works += [world.send(big, r, tag=1, async_op=True) for r in others]
        for work in works:
            work.wait(timeout_s=60)


def _flood_without_end(world, other: int) -> None:
    while True:
        works = [world.recv(np.zeros(100), other, tag=t, async_op=True) for t in range(20)]
        works += [world.send(np.ones(100), other, tag=t, async_op=True) for t in range(20)]
        for work in works:
            work.wait(timeout_s=30)


def _fault_in_messages(rank: int, world_size: int, backend: str, fault: str) -> None:
    world = dist.init(backend, timeout_s=60)
    store = _store()
    store.set(f"pid-{rank}", str(os.getpid()))
    pid = int(store.get("pid-1"))
    world.barrier()
    if fault == "stop":
        world.timeout_s = 4.0  # far above what one exchange takes
    if rank == 1:
        if fault == "kill":
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        with contextlib.suppress(CollectiveError):
            _exchange_without_end(world, rank, world_size)
        dist.shutdown()
        return
    if rank == 0 and fault == "stop":
        threading.Timer(0.2, lambda: os.kill(pid, signal.SIGSTOP)).start()
    begun_s = lived_s()
    expected = PeerLostError if fault == "kill" else CollectiveTimeoutError
    try:
        with pytest.raises(expected) as caught:
            _exchange_without_end(world, rank, world_size)
        assert lived_s() - begun_s < 25
        assert caught.value.ranks == (1,), str(caught.value)
        store.set(f"saw-{rank}", "1")
        store.wait([f"saw-{r}" for r in range(world_size) if r != 1], timeout=60)
    finally:
        if rank == 0 and fault == "stop":
            os.kill(pid, signal.SIGCONT)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), OURS)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_dies_or_freezes_among_messages_is_named(backend, engine, fault):
    codes = {1: -signal.SIGKILL} if fault == "kill" else None
    run(_fault_in_messages, 4, backend, engine, fault, exit_codes=codes, timeout_s=60)


def _wait_in_turn(rank: int, world_size: int, backend: str, way: str) -> None:
    """Rank 0 waits for rank 1, which waits for the last rank; no message nor call comes from it."""
    world = dist.init(backend, timeout_s=30)
    last, store = world_size - 1, _store()
    world.barrier()
    if rank == 0:
        store.wait(["waits"], timeout=60)
        with pytest.raises(CollectiveTimeoutError) as caught:
            world.recv(np.zeros(1), 1, timeout_s=1.0)
        assert caught.value.ranks == (last,), str(caught.value)
        assert f"rank 1 waits in turn for rank {last}" in str(caught.value)
        assert "recv #0 from rank 1 in group 'world' (4 ranks)" in str(caught.value)
        store.set("seen", "1")
    elif rank == last:
        store.wait(["seen"], timeout=60)
    else:
        takes = way == "recv" and rank == 1
        if rank == 1:
            once_inside(way, lambda: store.set("waits", "1"))
        with pytest.raises(CollectiveError) as caught:
            world.recv(np.zeros(1), last) if takes else world.all_reduce(np.zeros(1))
        assert caught.value.ranks == (last,), str(caught.value)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ACROSS)
@pytest.mark.parametrize("way", ["recv", "all_reduce"])
def test_a_rank_that_waits_in_turn_is_not_blamed_for_a_late_message(backend, engine, way):
    run(_wait_in_turn, 4, backend, engine, way)


def _time_out_in_turn(rank: int, world_size: int, backend: str) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2; both time out, at nearly the same time."""
    # Each follows the chain for this long after its own time-out; a busy machine may need longer.
    importlib.import_module("echelon.dist.membership.liveness")._ANSWER_S = 6.0
    world = dist.init(backend, timeout_s=30)
    store = _store()
    world.barrier()
    if rank == 2:
        store.wait(["saw-0", "saw-1"], timeout=60)
    else:
        if rank == 0:
            store.wait(["waits"], timeout=60)
        else:
            once_inside("recv", lambda: store.set("waits", "1"))
        with pytest.raises(CollectiveTimeoutError) as caught:
            world.recv(np.zeros(1), rank + 1, timeout_s=1.0)
        assert caught.value.ranks == (2,), str(caught.value)
        store.set(f"saw-{rank}", "1")
    dist.shutdown()


@pytest.mark.parametrize("engine", ["native", "python"])
def test_of_two_ranks_of_a_host_that_time_out_in_turn_the_end_of_the_chain_is_named(engine):
    run(_time_out_in_turn, 3, "shm", engine)


def _be_late_inside(rank: int, world_size: int, backend: str, call: str) -> None:
    world = dist.init(backend, timeout_s=30)
    store = _store()
    world.barrier()
    if rank == 2:
        x, is_message = np.zeros(1), call == "recv"
        with pytest.raises(CollectiveTimeoutError) as caught:
            world.recv(x, 3, timeout_s=1.0) if is_message else world.all_reduce(x, timeout_s=1.0)
        assert 3 in caught.value.ranks, str(caught.value)
        assert caught.value.ranks == (3,) or not is_message, str(caught.value)
        store.set("seen", "1")
    store.wait(["seen"], timeout=60)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ACROSS)
@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_a_late_rank_of_the_second_host_is_named_by_its_own_number(backend, engine, call):
    run(_be_late_inside, 4, backend, engine, call)


def _abort_in_flood(rank: int, world_size: int, backend: str) -> None:
    world = dist.init(backend, timeout_s=60)
    world.barrier()
    if rank == 0:
        threading.Timer(0.3, world.abort).start()
    begun_s = lived_s()
    with pytest.raises(CollectiveError) as caught:
        _flood_without_end(world, 1 - rank)
    assert caught.value.ranks == (0,), str(caught.value)
    assert lived_s() - begun_s < 10
    begun_s = lived_s()
    dist.shutdown()
    assert lived_s() - begun_s < 3


@pytest.mark.parametrize(("backend", "engine"), OURS)
def test_an_abort_ends_a_flood_of_messages_on_both_ranks(backend, engine):
    run(_abort_in_flood, 2, backend, engine)


# ---- forks ----


def _fork(rank: int, world_size: int, backend: str, way: str) -> None:
    world = dist.init(backend, timeout_s=30)
    x = np.ones(3)
    world.all_reduce(x, async_op=True).wait()
    peer = 1 - rank
    work = world.recv(np.zeros(3), peer, tag=1, async_op=True)
    world.send(x, peer, tag=1)
    work.wait()
    child = os.fork()
    if child == 0:
        if way == "os._exit":
            os._exit(7)
        if way == "closes":
            world.close()
            dist.shutdown()
        raise SystemExit(7)
    limit = time.monotonic() + 20
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked child hung at its exit")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 7
    y = np.ones(3)
    world.all_reduce(y)
    assert y[0] == world_size
    works = [world.recv(np.zeros(3), peer, tag=2, async_op=True)]
    works.append(world.send(y, peer, tag=2, async_op=True))
    for work in works:
        work.wait(timeout_s=20)
    dist.shutdown()


@pytest.mark.parametrize(("backend", "engine"), ENGINES)
@pytest.mark.parametrize("way", ["sys.exit", "os._exit", "closes"])
def test_a_forked_child_exits_and_its_parents_group_works_on(backend, engine, way):
    run(_fork, 2, backend, engine, way)
