"""What the engines of real devices share, on a device that is made up: order, errors, ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from tests.dist import made_up
from tests.support.moments import lived_s
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks


def _sum_in_order(world, array) -> None:
    """The same bits as adding one rank after the other; fewer elements than ranks, too."""
    for numel in (1, 2, 7, 1001):
        seeds = [torch.Generator().manual_seed(numel + rank) for rank in range(world.size)]
        parts = [torch.randn(numel, generator=seed) for seed in seeds]
        x = array(parts[world.rank].clone())
        world.all_reduce(x)
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        assert torch.equal(x.read(), expected), numel


def _compute_between(rank: int, world_size: int, backend, reduction: str) -> None:
    world, array = made_up.init(backend, timeout_s=30, reduction=reduction)
    total = world_size * (world_size + 1) / 2
    x = array(torch.zeros(3))
    x.compute(lambda t: t.fill_(rank + 1))  # queued: the host does not wait for it
    world.all_reduce(x)
    x.compute(lambda t: t.mul_(2))  # queued behind the sum
    assert x.read().tolist() == [2 * total] * 3
    y, out = array(torch.zeros(2)), array(torch.zeros(2 * world_size))
    y.compute(lambda t: t.fill_(rank))
    works = [world.all_gather(out, y, async_op=True), world.all_reduce(y, "max", async_op=True)]
    for work in works:
        work.wait()
    assert out.read().tolist() == [r for r in range(world_size) for _ in range(2)]
    assert y.read().tolist() == [world_size - 1] * 2
    made_up.wait_until(lambda: all(work.done for work in works))
    _move(world, array)
    _reduce(world, array)
    _refuse(world, array)
    if reduction == "rank_ordered":
        _sum_in_order(world, array)
    world.barrier()
    made_up.shutdown()


def _move(world, array) -> None:
    me, size = world.rank, world.size
    for dtype in (torch.int16, torch.bool, torch.float64):
        z = array(torch.full((3,), me % 2, dtype=dtype))
        world.broadcast(z, 1)
        assert z.read().tolist() == [1] * 3
    empty = array(torch.zeros(0))
    world.broadcast(empty, 0)
    mine = array(torch.full((2,), float(me)))
    gathered = array(torch.zeros(2 * size)) if me == 0 else None
    world.gather(gathered, mine, 0)
    if gathered is not None:
        assert gathered.read().tolist() == [r for r in range(size) for _ in range(2)]
    world.scatter(mine, gathered, 0)
    assert mine.read().tolist() == [me] * 2
    rows = array(torch.full((size * (size + 1) // 2,), float(me)))
    out = array(torch.full(((me + 1) * size,), -1.0))
    splits = [rank + 1 for rank in range(size)]  # rank r gets r + 1 of everybody
    world.all_to_all(out, rows, output_splits=[me + 1] * size, input_splits=splits)
    assert out.read().tolist() == [r for r in range(size) for _ in range(me + 1)]
    sent, came = array(torch.full((4,), float(me))), array(torch.zeros(4))
    with world.coalesce():
        world.send(sent, (me + 1) % size)
        world.recv(came, (me - 1) % size)
    assert came.read().tolist() == [(me - 1) % size] * 4


def _reduce(world, array) -> None:
    me, size = world.rank, world.size
    values = [torch.tensor([0.1, 1e8, -1e8, 3.0]).roll(r) * (r + 1) for r in range(size)]
    expected = sum(values[1:], values[0].clone())  # in another order it is something else
    x = array(values[me])
    world.all_reduce(x, "avg")
    assert x.read().tolist() == (expected / size).tolist()
    kept = array(values[me])
    world.reduce(kept, 1)
    assert torch.equal(kept.read(), expected if me == 1 else values[me])
    out = array(torch.zeros(1))
    wide = array(torch.arange(size, dtype=torch.float32) + me)
    world.reduce_scatter(out, wide)
    assert out.read()[0] == size * me + size * (size - 1) / 2
    for op, expected in (("min", [False, True]), ("band", [False, True]), ("max", [True, True]),
                         ("bor", [True, True])):  # fmt: skip
        flags = array(torch.tensor([me == 0, True]))
        world.all_reduce(flags, op)
        assert flags.read().tolist() == expected, op


def _refuse(world, array) -> None:
    """Before anything gets a number: the group works on, in step."""
    with pytest.raises(ValueError, match="has no sums of int16"):
        world.all_reduce(array(torch.zeros(2, dtype=torch.int16)))
    with pytest.raises(ValueError, match="has no bxor"):
        world.all_reduce(array(torch.zeros(2, dtype=torch.int64)), "bxor")
    if world.rank == 0:
        with pytest.raises(ValueError, match="uses cuda:0"):
            world.all_reduce(array(torch.zeros(2), index=7))
    x = array(torch.ones(2))
    world.all_reduce(x)
    assert x.read().tolist() == [world.size] * 2


@pytest.mark.parametrize("backend", [None, "made-up"])
@pytest.mark.parametrize("reduction", ["fast", "rank_ordered"])
def test_operations_are_in_order_with_what_the_caller_computes(backend, reduction):
    run_ranks(_compute_between, 3, backend, reduction, timeout_s=90)


# ---- which device ----


def _take_own_device(rank: int, world_size: int, chosen: int) -> None:
    array = made_up.array_on(rank if chosen < 0 else chosen + rank)
    if chosen >= 0:
        made_up.accelerator.set_device(chosen + rank)
    world, _ = made_up.init("made-up", timeout_s=30)
    x = array(torch.ones(2))
    world.all_reduce(x)
    assert x.read().tolist() == [2, 2]
    made_up.shutdown()


@pytest.mark.parametrize("chosen", [-1, 3])
def test_without_an_array_the_device_is_the_programs_choice_or_of_local_rank(chosen):
    run_ranks(_take_own_device, 2, chosen)


# ---- launching: nothing blocks the host ----


def _wait_for_first_contact(rank: int, world_size: int) -> None:
    """The library blocks in the first call of a kind until all ranks make it."""
    world, array = made_up.init("made-up", timeout_s=20)
    world.timeout_s = 1.5
    if rank == 0:
        began_s = lived_s()
        work = world.all_reduce(array(torch.ones(2)), async_op=True)
        assert lived_s() - began_s < 1, "async_op=True blocked the host"
        made_up.wait_until(lambda: work.done)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #0 .* after 1.5 s"):
            work.wait()
        made_up.store().set("gave-up", "1")
    else:
        made_up.store().get("gave-up", timeout=60)
    made_up.shutdown()


def test_a_first_call_that_a_rank_never_makes_ends_at_its_timeout():
    run_ranks(_wait_for_first_contact, 2, timeout_s=60)


def _connect_in_two_orders(rank: int, world_size: int) -> None:
    """Each rank first calls on another group: in one thread both would wait for each other."""
    _, array = made_up.init("made-up", timeout_s=20)
    groups = [dist.new_group([0, 1], name=name) for name in ("a", "b")]
    arrays = [array(torch.ones(2)) for _ in groups]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [groups[place].all_reduce(arrays[place], async_op=True) for place in order]
    for work in works:
        work.wait()
    assert [x.read().tolist() for x in arrays] == [[2, 2], [2, 2]]
    made_up.shutdown()


def test_two_groups_may_be_called_in_different_orders():
    run_ranks(_connect_in_two_orders, 2, timeout_s=60)


def _wait_for_missing(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=20)
    x = array(torch.ones(2))
    world.all_reduce(x)
    world.timeout_s = 1.5
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        work.wait()  # in order behind the caller's stream, which does not say that it is done
        assert not work.done
        made_up.wait_until(lambda: work.done)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 .* after 1.5 s"):
            work.wait()
        with pytest.raises(CollectiveTimeoutError, match="broken since all_reduce #1"):
            world.all_reduce(x)
        x.read()  # the stuck kernel is gone
        made_up.store().set("gave-up", "1")
    else:
        made_up.store().get("gave-up", timeout=60)
    made_up.shutdown()


def test_an_operation_that_a_rank_never_joins_ends_at_its_timeout():
    run_ranks(_wait_for_missing, 2, timeout_s=60)


# ---- failures ----


def _wait_for_dead(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 1:
        x.read()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 ") as caught:
        _all_reduce_to_its_end(world, x)
    assert caught.value.ranks == (1,)
    made_up.shutdown()


def _all_reduce_to_its_end(world, x) -> None:
    work = world.all_reduce(x, async_op=True)  # raises itself if the death is known already
    made_up.wait_until(lambda: work.done)
    work.wait()


def test_a_killed_rank_ends_what_runs_on_the_device():
    run_ranks(_wait_for_dead, 3, exit_codes={1: -signal.SIGKILL}, timeout_s=60)


_SAID = "ncclUnhandledCudaError: out of memory"


def _fail_to_launch(rank: int, world_size: int) -> None:
    """The library of rank 1 refuses a launch: all ranks get its text, and no other rank's name."""
    world, array = made_up.init("made-up", timeout_s=20)
    x = array(torch.ones(2))
    world.all_reduce(x)
    x.read()
    if rank == 1:
        made_up.Faults.launch = _SAID
    with pytest.raises(CollectiveError, match=_SAID) as caught:
        _all_reduce_to_its_end(world, x)
    assert not isinstance(caught.value, PeerLostError)
    assert caught.value.ranks == (1,)
    made_up.shutdown()


def test_a_librarys_error_reaches_all_ranks_with_its_text_and_its_rank():
    run_ranks(_fail_to_launch, 3, timeout_s=60)


def _hear_of_failure(rank: int, world_size: int) -> None:
    """The library of rank 0 reports an error while an operation runs."""
    world, array = made_up.init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        work.wait()
        made_up.Faults.reported = "ncclRemoteError: a fault of the device"
        made_up.wait_until(lambda: work.done)
        with pytest.raises(CollectiveError, match="ncclRemoteError: a fault of the device"):
            work.wait()
        made_up.store().set("reported", "1")
    else:
        made_up.store().get("reported", timeout=60)
    made_up.shutdown()


def test_an_error_that_the_library_reports_later_ends_the_group():
    run_ranks(_hear_of_failure, 2, timeout_s=60)


def _ask_a_broken_device(rank: int, world_size: int) -> None:
    """After a fault of the device every question to an event raises: that ends no thread."""
    world, array = made_up.init("made-up", timeout_s=600)
    x, y = array(torch.ones(2)), np.ones(2)
    world.all_reduce(x)
    x.read()
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        made_up.accelerator.fault = "an illegal memory access was encountered"
        made_up.wait_until(lambda: work.done)
        with pytest.raises(CollectiveError, match="an illegal memory access"):
            work.wait()
        assert any(one.name == "echelon-watcher" for one in threading.enumerate())
        with pytest.raises(CollectiveError, match="broken since"):
            world.all_reduce(y)
        made_up.store().set("reported", "1")
    else:
        made_up.store().get("reported", timeout=60)
    made_up.shutdown()


def test_an_event_that_raises_ends_the_operation_and_not_the_watcher():
    run_ranks(_ask_a_broken_device, 2, timeout_s=60)


# ---- the end ----


def _abort_inside(rank: int, world_size: int, can_revoke: bool) -> None:
    """A thread is inside the library, connecting, when the group is aborted."""
    made_up.Faults.can_revoke = can_revoke
    world, array = made_up.init("made-up", timeout_s=600)
    if rank == 0:
        work = world.all_reduce(array(torch.ones(2)), async_op=True)
        made_up.wait_until(lambda: made_up.num_inside() == 1)
        began_s = lived_s()
        world.abort()
        assert lived_s() - began_s < 1.5
        with pytest.raises(CollectiveError, match="aborted on rank 0"):
            work.wait(timeout_s=30)
        made_up.store().set("aborted", "1")
    else:
        made_up.store().get("aborted", timeout=60)
    began_s = lived_s()
    made_up.shutdown()
    assert lived_s() - began_s < 3


@pytest.mark.parametrize("can_revoke", [True, False])
def test_a_communicator_is_not_freed_under_a_thread_that_is_inside(can_revoke):
    run_ranks(_abort_inside, 2, can_revoke, timeout_s=60)


def _call_from_threads(rank: int, world_size: int) -> None:
    """One communicator is entered by one thread at a time, whatever the caller does."""
    world, array = made_up.init("made-up", timeout_s=30)
    groups = [dist.new_group([0, 1], name=str(number)) for number in range(2)]
    x = array(torch.ones(2))
    world.all_reduce(x)

    def call(group, tag):
        # A stream of its own: on one, a thread's send would wait for another thread's receive.
        with made_up.accelerator.device(rank), made_up.accelerator.stream(made_up.Stream()):
            exchange(group, tag)

    def exchange(group, tag):
        for _ in range(10):
            y, z = array(torch.full((2,), float(rank))), array(torch.zeros(2))
            sent = group.send(y, 1 - rank, tag=tag, async_op=True)
            group.recv(z, 1 - rank, tag=tag)
            sent.wait()
            assert z.read().tolist() == [1 - rank] * 2

    threads = [
        threading.Thread(target=call, args=(group, tag))
        for group in (world, *groups)
        for tag in range(2)
    ]
    for thread in threads:
        thread.start()
    for _ in range(10):
        world.all_reduce(x, "max")
    for thread in threads:
        thread.join()
    assert x.read().tolist() == [2, 2]
    world.barrier()
    made_up.shutdown()


def test_threads_share_a_group():
    run_ranks(_call_from_threads, 2, timeout_s=90)


def _shut_down_while_it_runs(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 0:
        world.all_reduce(x, async_op=True)
        made_up.store().set("leaving", "1")
        made_up.shutdown()
        x.read()  # no kernel is left on the device
    else:
        made_up.store().get("leaving", timeout=60)
        made_up.shutdown()


def test_shutdown_ends_what_still_runs():
    run_ranks(_shut_down_while_it_runs, 2, timeout_s=60)


# ---- several at once ----


def _coalesce(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=30)
    assert world.backend == "made-up"
    x, y = array(torch.ones(2)), np.ones(2)
    others = [array(torch.ones(2)) for _ in range(3)]
    with world.coalesce():
        world.all_reduce(x)
        world.all_reduce(x)  # of the same memory: not at the same time
        for other in others:
            world.all_reduce(other)
        world.all_reduce(y)  # the host's beside it
    assert (x.read().tolist(), y.tolist()) == ([4.0, 4.0], [2.0, 2.0])
    assert all(other.read().tolist() == [2.0, 2.0] for other in others)
    assert world.broadcast_object({"from": rank}, 1) == {"from": 1}
    alone = world.split(rank)
    assert alone.size == 1
    made_up.shutdown()


def test_objects_and_arrays_of_the_host_go_beside_the_device():
    run_ranks(_coalesce, 2, timeout_s=60)


def _batch_beside(rank: int, world_size: int) -> None:
    """A batch is its thread's and its group's: other calls are launched as they come."""
    world, array = made_up.init("made-up", timeout_s=30)
    other = dist.new_group([0, 1], name="other")
    x, y, z = (array(torch.ones(2)) for _ in range(3))
    with world.coalesce():
        world.all_reduce(x)
        other.all_reduce(y)  # another group, in the block: launched at once, and ordered
        assert y.read().tolist() == [2, 2]
        thread = threading.Thread(target=lambda: world.send(z, 1 - rank, async_op=True).wait())
        thread.start()  # another thread, in the block: not held back by it
        got = array(torch.zeros(2))
        reader = threading.Thread(target=lambda: world.recv(got, 1 - rank))
        reader.start()
        thread.join(20)
        reader.join(20)
        assert not thread.is_alive()
        assert not reader.is_alive()
    assert x.read().tolist() == [2, 2]
    assert got.read().tolist() == [1, 1]
    world.barrier()
    made_up.shutdown()


def test_a_batch_holds_back_only_its_own_threads_calls_of_its_group():
    run_ranks(_batch_beside, 2, timeout_s=60)


def _raise_in_batch(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=30)
    x = array(torch.ones(2))
    world.all_reduce(x)
    x.read()
    before = made_up.num_launched()
    with pytest.raises(KeyError, match="ours"):
        _fail_within(world, x, called_by=world_size)
    assert made_up.num_launched() == before
    with pytest.raises(CollectiveError, match="broken since all_reduce #1"):
        world.all_reduce(x)
    made_up.shutdown()


def _fail_within(world, x, called_by: int = 0) -> None:
    store = made_up.store()
    with world.coalesce():
        if called_by:
            world.all_reduce(x)
            store.add("called", 1)
            made_up.wait_until(lambda: store.add("called", 0) == called_by)
        raise KeyError("ours")


def test_a_batch_whose_block_raises_launches_nothing_and_ends_the_group():
    run_ranks(_raise_in_batch, 2, timeout_s=60)


def _raise_alone(rank: int, world_size: int) -> None:
    """Rank 0's operation has a number and is never launched: rank 1 need not wait 600 s for it."""
    world, array = made_up.init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    with pytest.raises(KeyError, match="ours"):
        _fail_within(world, x)  # nothing was called in it: nothing is lost
    world.all_reduce(x)
    x.read()
    if rank == 0:
        with pytest.raises(KeyError, match="ours"):
            _fail_within(world, x, called_by=1)
    else:
        with pytest.raises(CollectiveError, match=r"not launched.*KeyError\('ours'\)") as caught:
            _all_reduce_to_its_end(world, x)
        assert caught.value.ranks == (0,)
    made_up.shutdown()


def test_a_batch_that_raises_on_one_rank_ends_the_others_at_once_with_its_name():
    run_ranks(_raise_alone, 2, timeout_s=60)


# ---- barriers, graphs, other streams, memory, times ----


def _meet_after_work(rank: int, world_size: int, backend) -> None:
    world, array = made_up.init(backend, timeout_s=30)
    x = array(torch.ones(2))
    world.all_reduce(x)
    done = threading.Event()
    x.compute(lambda _: (time.sleep(0.3 * rank), made_up.store().set(f"computed/{rank}", "1")))
    x.compute(lambda _: done.set())
    world.barrier()
    assert done.is_set(), "the barrier did not wait for the device"
    for other in range(world_size):
        assert made_up.store().check([f"computed/{other}"])
    made_up.shutdown()


@pytest.mark.parametrize("backend", [None, "made-up"])
def test_a_barrier_waits_for_the_devices_of_all_ranks(backend):
    run_ranks(_meet_after_work, 3, backend, timeout_s=60)


def _capture(rank: int, world_size: int) -> None:
    """Operations of a graph have no event; nothing is asked while a capture runs."""
    world, array = made_up.init("made-up", timeout_s=20)
    x, y = array(torch.ones(2)), array(torch.zeros(2))
    send, receive = (world.send, world.recv) if rank == 0 else (world.recv, world.send)
    world.all_reduce(x)
    world.all_reduce(y, "max")
    send(x, 1 - rank)
    receive(y, 1 - rank)
    x.read(), y.read()
    running = world.all_reduce(x, async_op=True)
    graph = made_up.Graph()
    world.timeout_s = 1.0
    with made_up.accelerator.graph(graph):
        x.compute(lambda t: t.add_(1))
        world.all_reduce(x)
        work = world.all_reduce(x, "max", async_op=True)
        work.wait()
        with pytest.raises(ValueError, match="Run the operation once before capturing it"):
            world.all_reduce(array(torch.ones(5)))
        with pytest.raises(ValueError, match="Run the operation once before capturing it"):
            world.send(x, 1 - rank, tag=9)
        time.sleep(0.5)  # for the threads that ask events
    running.wait()
    made_up.wait_until(lambda: running.done)
    before = x.read().clone()
    time.sleep(1.5)  # longer than the timeout: what was captured is not watched
    for _ in range(2):
        graph.replay()
    expected = ((before + 1) * 2 + 1) * 2
    assert x.read().tolist() == expected.tolist()
    made_up.shutdown()


def test_a_graph_captures_collectives_and_is_left_alone():
    run_ranks(_capture, 2, timeout_s=60)


def _use_another_stream(rank: int, world_size: int) -> None:
    """CuPy says by the array interface on which stream it works: that one is ordered too."""
    world, array = made_up.init("made-up", timeout_s=30)
    other = made_up.Stream()
    x = array(torch.zeros(2), stream=id(other))
    other.put(lambda: (time.sleep(0.2), x.tensor.fill_(rank + 1)))
    world.all_reduce(x)
    other.put(lambda: x.tensor.mul_(2))
    other.synchronize()
    assert x.tensor.tolist() == [6, 6]
    made_up.shutdown()


def test_the_stream_of_the_array_interface_is_ordered():
    run_ranks(_use_another_stream, 2, timeout_s=60)


def _send_from_another_stream(rank: int, world_size: int, backend) -> None:
    """A blocking send returns before its copy is made: the array's own stream waits for that."""
    world, array = made_up.init(backend, timeout_s=30)
    world.all_reduce(array(torch.ones(1)))
    if rank == 0:
        other = made_up.Stream()
        x = array(torch.ones(2), stream=id(other))
        array(torch.zeros(1)).compute(lambda _: time.sleep(0.3))  # the copy comes behind this
        world.send(x, 1)
        other.put(lambda: x.tensor.fill_(-1))
        other.synchronize()
    else:
        y = array(torch.zeros(2))
        world.recv(y, 0)
        assert y.read().tolist() == [1, 1]
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("backend", ["made-up", "shm"])
def test_an_array_of_another_stream_may_be_written_once_its_send_returns(backend):
    run_ranks(_send_from_another_stream, 2, backend, timeout_s=60)


def _keep_arrays(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=30)
    world.all_reduce(array(torch.ones(2)))
    x = array(torch.ones(2))
    kept = weakref.ref(x.tensor)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        del x
        gc.collect()
        assert kept() is not None, "the array of a running operation was freed"
        made_up.store().set("started", "1")
    else:
        made_up.store().get("started", timeout=60)
        work = world.all_reduce(x, async_op=True)
        del x
    works = [work]
    del work
    made_up.wait_until(lambda: works[0].done)
    works.pop().wait()
    made_up.wait_until(lambda: gc.collect() is not None and kept() is None)
    assert made_up.accelerator.num_records == 0
    made_up.shutdown()


def test_an_array_is_kept_until_its_operation_is_done_and_no_longer():
    run_ranks(_keep_arrays, 2, timeout_s=60)


def _take_times(rank: int, world_size: int) -> None:
    """Start and end are the device's, not those of the call or of the question."""
    world, array = made_up.init("made-up", timeout_s=30)
    x = array(torch.ones(2))
    world.all_reduce(x)
    x.read()
    world.barrier()
    computed = []
    called_ns = time.monotonic_ns()
    x.compute(lambda _: (time.sleep(0.3), computed.append(time.monotonic_ns())))
    work = world.all_reduce(x, async_op=True)
    work.wait()
    x.read()
    ended_ns = time.monotonic_ns()
    time.sleep(1)  # the question comes late
    made_up.wait_until(lambda: work.done)
    pending = work.pending
    slack_ns = 250_000_000  # a busy host ties the clocks late
    assert called_ns + 300_000_000 <= computed[0] <= pending.started_mono_ns + slack_ns
    assert pending.started_mono_ns < pending.ended_mono_ns <= ended_ns + slack_ns
    made_up.shutdown()


def test_the_times_of_an_operation_are_the_devices():
    run_ranks(_take_times, 2, timeout_s=60)


def _ask_little(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=60)
    x = array(torch.ones(2))
    world.all_reduce(x)
    x.read()
    if rank == 0:
        works = [world.all_reduce(x, async_op=True) for _ in range(100)]
        me = threading.get_ident()  # the watcher asks as well, however long this one is held up
        before = made_up.Event.asked[me]
        works.append(world.all_reduce(x, async_op=True))
        assert made_up.Event.asked[me] - before < 10, "each call asks every event"
        made_up.store().set("asked", "1")
    else:
        made_up.store().get("asked", timeout=60)
        works = [world.all_reduce(x, async_op=True) for _ in range(101)]
    for work in works:
        work.wait()
    x.read()
    made_up.shutdown()


def test_a_call_does_not_ask_every_operation_under_way():
    run_ranks(_ask_little, 2, timeout_s=60)
