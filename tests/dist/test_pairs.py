"""Messages between devices: lanes of two ranks that never wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.errors import CollectiveTimeoutError
from tests.dist import made_up
from tests.support.moments import lived_s
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks


def _send_around(rank: int, world_size: int, reduction: str) -> None:
    """Each rank sends first and receives then: no stream waits in a send."""
    world, array = made_up.init("made-up", timeout_s=20, reduction=reduction)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(3):  # blocking: the array may be written once the call returns
        x, y = array(torch.full((3,), rank + 10.0 * turn)), array(torch.zeros(3))
        world.send(x, after)
        x.compute(lambda t: t.fill_(-1))
        world.recv(y, before)
        assert y.read().tolist() == [before + 10.0 * turn] * 3
    for turn in range(3):
        z, y = array(torch.full((3,), rank + 10.0 * turn)), array(torch.zeros(3))
        work = world.send(z, after, async_op=True)
        world.recv(y, before)
        work.wait()
        assert y.read().tolist() == [before + 10.0 * turn] * 3
    with world.coalesce():
        world.send(x, after)
        world.recv(y, before)
    assert y.read().tolist() == [-1] * 3
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("reduction", ["fast", "rank_ordered"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_may_send_before_they_receive(world_size, reduction):
    run_ranks(_send_around, world_size, reduction, timeout_s=60)


def _choose_by_tag(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=20)
    if rank == 0:
        works = [
            world.send(array(torch.full((2,), value)), 1, tag=tag, async_op=True)
            for tag, value in ((7, 1.0), (8, 2.0), (7, 3.0))
        ]
    else:
        arrays = [array(torch.zeros(2)) for _ in range(3)]
        works = [
            world.recv(one, 0, tag=tag, async_op=True)
            for tag, one in zip((8, 7, 7), arrays, strict=True)
        ]
    for work in works:
        work.wait()
    if rank == 1:
        assert [one.read()[0].item() for one in arrays] == [2, 1, 3]
    world.barrier()
    made_up.shutdown()


def test_a_tag_chooses_its_message_and_keeps_their_order():
    run_ranks(_choose_by_tag, 2, timeout_s=60)


def _post_early(rank: int, world_size: int) -> None:
    """What 1F1B does: receives posted long before, in both directions, with collectives between."""
    world, array = made_up.init("made-up", timeout_s=20)
    got = [array(torch.zeros(2)) for _ in range(4)]
    works = [world.recv(one, 1 - rank, tag=n % 2, async_op=True) for n, one in enumerate(got)]
    x = array(torch.ones(2))
    for _ in range(3):
        world.all_reduce(x)  # a receive that cannot be answered yet holds up no collective
    assert x.read().tolist() == [8, 8]
    assert not any(work.done for work in works)
    world.barrier()  # or the other rank's sends arrive before this one has looked
    for number in range(4):
        value = array(torch.full((2,), 100.0 * rank + number))
        works.append(world.send(value, 1 - rank, tag=number % 2, async_op=True))
    for work in works:
        work.wait()
    assert [one.read()[0].item() for one in got] == [100.0 * (1 - rank) + n for n in range(4)]
    world.barrier()
    made_up.shutdown()


def test_receives_posted_early_hold_up_nothing():
    run_ranks(_post_early, 2, timeout_s=60)


def _wait_for_no_send(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=20)
    if rank == 1:
        world.timeout_s = 1.5
        began_s = lived_s()
        work = world.recv(array(torch.zeros(2)), 0, tag=3, async_op=True)
        assert lived_s() - began_s < 1
        made_up.wait_until(lambda: work.done)
        with pytest.raises(CollectiveTimeoutError, match=r"recv #0 from rank 0 .* after 1.5 s"):
            work.wait()
        made_up.store().set("gave-up", "1")
    else:
        made_up.store().get("gave-up", timeout=60)
    made_up.shutdown()


def test_a_receive_that_is_never_answered_ends_at_its_timeout():
    run_ranks(_wait_for_no_send, 2, timeout_s=60)


def _open_channels(rank: int, world_size: int, backend) -> None:
    """Connected by both ends together, in any order: no message connects, in either direction."""
    world, array = made_up.init(backend, timeout_s=20)
    x = array(torch.full((2,), float(rank)))
    if backend is None:
        with pytest.raises(ValueError, match="must be a collective"):
            world.channel((rank + 1) % world_size, "early").open(x)
        world.all_reduce(array(torch.ones(1)))
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    lanes = [world.channel(peer, "ring") for peer in (after, before)]
    for work in [lane.open(x, async_op=True) for lane in lanes]:
        work.wait()  # with blocking calls every rank would wait for the next one
    for lane in lanes:
        lane.open(x)  # a second time: nothing is left to do
    to, source = lanes
    y = array(torch.zeros(2))
    graph = made_up.Graph()
    with made_up.accelerator.graph(graph):  # refused, were one of them not connected
        for call in (to.send, source.recv) if rank else (source.recv, to.send):
            call(x if call == to.send else y)
    graph.replay()
    assert y.read().tolist() == [before] * 2
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("backend", [None, "made-up"])
def test_channels_are_connected_in_both_directions_when_they_are_open(backend):
    run_ranks(_open_channels, 3, backend, timeout_s=60)


def _open_before_a_graph(rank: int, world_size: int, backend) -> None:
    """The byte that connects is late on one end: a graph's message must not take its place."""
    world, array = made_up.init(backend, timeout_s=20)
    made_up.Faults.byte_s = 0.0 if rank else 0.3
    x, y = array(torch.full((4,), rank + 1.0)), array(torch.zeros(4))
    world.all_reduce(array(torch.ones(1)))
    lane = world.channel(1 - rank, "ring")
    lane.open(x)
    graph = made_up.Graph()
    with made_up.accelerator.graph(graph):
        lane.recv(y) if rank else lane.send(x)
        lane.send(x) if rank else lane.recv(y)
    graph.replay()
    assert y.read().tolist() == [2.0 - rank] * 4
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("backend", [None, "made-up"])
def test_a_channel_is_open_once_the_byte_that_connects_has_arrived(backend):
    run_ranks(_open_before_a_graph, 2, backend, timeout_s=60)


def _capture_at_once(rank: int, world_size: int) -> None:
    """The threads that connect pause once they have: a capture need not wait for them."""
    world, array = made_up.init("made-up", timeout_s=20)
    made_up.pause_after_connecting(0.5)
    x, y = array(torch.full((2,), rank + 1.0)), array(torch.zeros(2))
    lane = world.channel(1 - rank, "ring")
    lane.open(x)
    world.all_reduce(y)
    y.read()
    graph = made_up.Graph()
    with made_up.accelerator.graph(graph):
        lane.recv(y) if rank else lane.send(x)
        world.all_reduce(y)
    graph.replay()
    assert y.read().tolist() == [1.0, 1.0]
    world.barrier()
    made_up.shutdown()


def test_what_has_connected_can_be_captured_at_once():
    run_ranks(_capture_at_once, 2, timeout_s=60)


def _send_headers(rank: int, world_size: int, backend) -> None:
    """What a pipeline does: a header over the host, the payload that it announces on the device."""
    world, array = made_up.init(backend, timeout_s=20)
    world.all_reduce(array(torch.ones(1)))
    lanes = [world.channel(1 - rank, name) for name in ("activations", "grads")]
    never = world.channel(1 - rank, "never").recv(array(torch.zeros(2)), async_op=True)
    works = []
    for number in range(4):
        for lane in lanes if rank else reversed(lanes):
            size = number + 1 if lane.name == "grads" else number
            works.append(lane.send(np.array([size]), async_op=True))
            works.append(lane.send(array(torch.full((size,), 10.0 * number + rank)), async_op=True))
    for number in range(4):
        for lane in lanes:
            header = np.zeros(1, np.int64)
            lane.recv(header)
            payload = array(torch.zeros(int(header[0])))
            lane.recv(payload, timeout_s=10)
            assert header[0] == (number + 1 if lane.name == "grads" else number)
            assert payload.read().tolist() == [10.0 * number + 1 - rank] * int(header[0])
    for work in works:
        work.wait()
    assert not never.done
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("backend", [None, "made-up", "shm"])
def test_a_channel_carries_headers_of_the_host_beside_payloads_of_the_device(backend):
    run_ranks(_send_headers, 2, backend, timeout_s=60)


def _open_alone(rank: int, world_size: int) -> None:
    world, array = made_up.init("made-up", timeout_s=20)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"open #0 with rank 1 .* after 0.5 s"):
            world.channel(1, "alone").open(array(torch.ones(1)), timeout_s=0.5)
        made_up.store().set("gave-up", "1")
    else:
        made_up.store().get("gave-up", timeout=60)
    made_up.shutdown()


def test_a_channel_that_only_one_end_opens_ends_at_its_timeout():
    run_ranks(_open_alone, 2, timeout_s=60)


def _use_too_many_tags(rank: int, world_size: int) -> None:
    from echelon.dist.backends.device.communicators import lanes

    lanes.MAX_LANES = 3
    world, array = made_up.init("made-up", timeout_s=20)
    other, x = 1 - rank, array(torch.ones(2))
    for tag in range(3):
        (world.send if rank == 0 else world.recv)(x, other, tag=tag)
    with pytest.raises(ValueError, match="more than 3 tags and channels on cuda"):
        world.send(x, other, tag=3)
    (world.send if rank == 0 else world.recv)(x, other, tag=2)
    x.read()
    world.barrier()
    made_up.shutdown()


def test_more_lanes_than_the_device_should_hold_are_refused_by_name():
    run_ranks(_use_too_many_tags, 2, timeout_s=60)
