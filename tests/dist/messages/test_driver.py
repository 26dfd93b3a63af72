"""The message thread over its real streams, with the ranks as objects of one process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading

import numpy as np
import pytest

from echelon.dist.backends.gloo.sockets import SECRET_BYTES, Sockets
from echelon.dist.backends.shm.memory import SharedMemory, anonymous_file, marks_bytes
from echelon.dist.backends.shm.rings import Rings
from echelon.dist.backends.shm.segment import Segment, segment_bytes
from echelon.dist.messages.driver import Driver
from echelon.dist.messages.protocol import Protocol
from echelon.dist.messages.transfer import Transfer
from echelon.dist.operation.operation import ANY_SOURCE, Operation
from tests.support.moments import lived_s

RING_BYTES = 5 * 64 * 100  # no power of two
SLOT_BYTES = 4096


class Closed(Exception):  # noqa: N818
    pass


class Lost(Exception):  # noqa: N818
    pass


class Group:
    """The drivers of all ranks."""

    def __init__(self, kind: str, size: int) -> None:
        self.gone: list[tuple[int, str]] = []
        self.streams = _sockets(size) if kind == "sockets" else _rings(size, lambda: self.gone)
        self.drivers = [
            Driver(
                f"test-messages-{rank}",
                Protocol(size, lambda _, sent: TypeError(sent)),
                streams,
                lambda peer, why: Lost(f"{peer}: {why}"),
            )
            for rank, streams in enumerate(self.streams)
        ]

    def send(self, rank: int, to: int, data: np.ndarray, tag: int = 0) -> Transfer:
        return self._post(
            rank, Operation("send", 0, data.dtype.name, peer=to, tag=tag, source=data)
        )

    def recv(self, rank: int, source: int, out: np.ndarray, tag: int = 0) -> Transfer:
        return self._post(
            rank, Operation("recv", 0, out.dtype.name, peer=source, tag=tag, target=out)
        )

    def _post(self, rank: int, operation: Operation) -> Transfer:
        transfer = Transfer(operation)
        self.drivers[rank].post(transfer)
        return transfer

    def close(self) -> None:
        for driver in self.drivers:
            driver.close(10, Closed())


def _sockets(size: int) -> list[Sockets]:
    made = [Sockets(rank, "127.0.0.1") for rank in range(size)]
    secret = os.urandom(SECRET_BYTES)
    for one in made:
        one.introduce([other.address for other in made], secret)
    return made


def _rings(size: int, gone) -> list[Rings]:
    num_bytes = segment_bytes(size, SLOT_BYTES, RING_BYTES)
    fd = anonymous_file(marks_bytes(size) + num_bytes)
    memory = SharedMemory(fd, size, num_bytes)
    os.close(fd)
    return [Rings(Segment(memory, SLOT_BYTES, RING_BYTES), rank, gone) for rank in range(size)]


@pytest.fixture(params=["sockets", "rings"])
def make(request):
    """Yield a function that makes a group; all of them are closed in the end."""
    made: list[Group] = []

    def make_group(size: int) -> Group:
        made.append(Group(request.param, size))
        return made[-1]

    yield make_group
    for group in made:
        group.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("test-messages")]


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_deliver_every_message_to_its_receive(make, seed):
    chance = random.Random(seed)
    size = chance.choice((2, 3, 5))
    group = make(size)
    posts: dict[tuple, list] = {}
    expected = []
    for number in range(200):
        a, b = chance.sample(range(size), 2)
        tag, length = chance.randrange(3), chance.choice((0, 1, 1000, 100_000, 2_000_000))
        data = np.random.default_rng(number).integers(0, 255, length, np.uint8)
        out = np.zeros(length, np.uint8)
        posts.setdefault((a, "send", b, tag), []).append((group.send, a, b, data, tag))
        posts.setdefault((b, "recv", a, tag), []).append((group.recv, b, a, out, tag))
        expected.append((out, data))
    transfers = []
    while posts:
        key = chance.choice(sorted(posts))
        call, *args = posts[key].pop(0)
        transfers.append(call(*args))
        if not posts[key]:
            del posts[key]
    for transfer in transfers:
        assert transfer.wait(30), transfer.operation
        assert transfer.error is None
    assert all((out == data).all() for out, data in expected)


@pytest.mark.parametrize("num", [3000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_a_flood_of_one_tag_stays_in_order_around_a_receive_of_another(make, num):
    group = make(2)
    pending = group.recv(1, 0, np.zeros(1), tag=5)
    sends = [group.send(0, 1, np.array([number]), tag=7) for number in range(num)]
    out = np.zeros(1, np.int64)
    for number in range(num):
        assert group.recv(1, 0, out, tag=7).wait(30)
        assert out[0] == number
    assert all(send.wait(30) and send.error is None for send in sends)
    assert not pending.done


def test_each_receive_from_any_source_tells_its_sender(make):
    group = make(4)
    for rank in (1, 2, 3):
        group.send(rank, 0, np.full(1000, rank))
    sources = set()
    for _ in range(3):
        out = np.zeros(1000, np.int64)
        receive = group.recv(0, ANY_SOURCE, out)
        assert receive.wait(60)
        assert (out == receive.source).all()
        sources.add(receive.source)
    assert sources == {1, 2, 3}


def test_what_a_rank_sent_before_it_left_arrives_though_it_has_left():
    for turn in range(30):
        group = Group("sockets", 2)
        early = group.recv(1, 0, np.zeros(1), tag=9)  # connects to rank 0, which will close that
        sends = [group.send(0, 1, np.full(100_000 * (turn % 3), n), tag=1) for n in range(5)]
        outs = [np.zeros(100_000 * (turn % 3), np.int64) for _ in range(5)]
        receives = [group.recv(1, 0, out, tag=1) for out in outs[:4]]
        for send in sends[:4]:
            assert send.wait(60)
        group.drivers[0].close(10, Closed())
        assert all(receive.wait(60) and receive.error is None for receive in receives), turn
        assert early.wait(60)
        assert isinstance(early.error, Lost)
        group.close()


def test_a_peer_that_ends_is_noticed_by_a_rank_that_only_waits_for_it(make):
    group = make(3)
    receive = group.recv(0, 1, np.zeros(1))
    other = group.recv(0, 2, np.zeros(1))
    group.drivers[1].close(10, Closed())
    group.gone.append((1, "left"))
    assert receive.wait(60)
    assert isinstance(receive.error, Lost)
    assert not other.done
    group.send(2, 0, np.ones(1))
    assert other.wait(60)
    assert other.error is None


def test_a_cut_ends_everything_at_once_and_whatever_comes_after(make):
    group = make(2)
    waiting = [group.recv(0, 1, np.zeros(1), tag=tag) for tag in range(300)]
    waiting.append(group.send(0, 1, np.zeros(20 << 20, np.uint8)))
    begun_s = lived_s()
    group.drivers[0].cut(Closed("cut"))
    for transfer in waiting:
        assert transfer.wait(60)
        assert isinstance(transfer.error, Closed)
    assert lived_s() - begun_s < 1
    late = group.recv(0, 1, np.zeros(1))
    assert late.wait(60)
    assert isinstance(late.error, Closed)


def test_300_tags_take_one_thread(make):
    group = make(2)
    lived_s()  # its thread is not one of theirs
    before = threading.active_count()
    outs = [np.zeros(1, np.int64) for _ in range(300)]
    receives = [group.recv(1, 0, out, tag=tag) for tag, out in enumerate(outs)]
    for tag in reversed(range(300)):
        group.send(0, 1, np.array([tag]), tag=tag)
    assert all(receive.wait(60) for receive in receives)
    assert [int(out[0]) for out in outs] == list(range(300))
    assert threading.active_count() <= before + 2
    begun_s = lived_s()
    group.close()
    assert lived_s() - begun_s < 1


def test_strangers_are_turned_away_and_the_group_works_on():
    group = Group("sockets", 2)
    receive = group.recv(0, 1, np.zeros(1))
    address = group.streams[0].address
    hellos = [b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n", b"ecm1" + bytes(36)]
    for hello in hellos:
        with socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(hello)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    silent = socket.create_connection(address, timeout=5)
    assert not receive.done
    group.send(1, 0, np.ones(1))
    assert receive.wait(60)
    assert receive.error is None
    silent.close()
    group.close()
