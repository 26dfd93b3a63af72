"""Sessions between nodes and the coordinator: nothing is lost and nothing arrives twice."""

from __future__ import annotations

import random

import pytest

from echelon.errors import LaunchError
from echelon.launcher.control.messages import Hello, pack, unpack
from echelon.launcher.control.session import WINDOW_BYTES, Session


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_once_and_in_order_whenever_connections_break(seed):
    chance = random.Random(seed)
    one, other = Session(), Session()
    ends, got, num_put = [one, other], {0: [], 1: []}, {0: 0, 1: 0}
    wires: list[list[bytes]] = [[], []]  # on the way from `one`, and from `other`
    for _ in range(2000):
        side = chance.randrange(2)
        act = chance.random()
        if act < 0.3 and num_put[side] < 200:
            ends[side].put(b"%d" % num_put[side])
            num_put[side] += 1
        elif act < 0.6:
            frame = ends[side].frame() or ends[side].beat()
            wires[side].append(frame)
        elif act < 0.95:
            if wires[1 - side]:
                message = ends[side].take(wires[1 - side].pop(0))
                if message is not None:
                    got[side].append(int(message))
        else:
            wires[0].clear()
            wires[1].clear()
            one.resume(other.received)
            other.resume(one.received)
    for _ in range(500):
        for side in (0, 1):
            wires[side].append(ends[side].frame() or ends[side].beat())
            message = ends[1 - side].take(wires[side].pop(0)) if len(wires[side]) < 2 else None
            while len(wires[side]) and message is None:
                message = ends[1 - side].take(wires[side].pop(0))
            if message is not None:
                got[1 - side].append(int(message))
    assert got == {0: list(range(num_put[1])), 1: list(range(num_put[0]))}
    assert one.is_idle
    assert other.is_idle


def test_no_more_is_on_its_way_than_the_window():
    one, other = Session(), Session()
    for _ in range(40):
        one.put(b"x" * (1 << 20))
    sent = []
    while (frame := one.frame()) is not None:
        sent.append(frame)
    assert sum(map(len, sent)) <= WINDOW_BYTES + (1 << 20)
    for frame in sent:
        other.take(frame)
    assert other.owes_acknowledgement
    one.take(other.beat())
    assert not other.owes_acknowledgement
    assert one.frame() is not None


@pytest.mark.parametrize(
    "frame", [b"", b"short", b"\x05" + bytes(15)], ids=["empty", "short", "gap"]
)
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(LaunchError):
        Session().take(frame)


def test_a_newer_greeting_can_be_read_and_so_refused():
    import msgpack

    name, values = msgpack.unpackb(pack(Hello(node="a", host="b", num_workers=1)))
    data = msgpack.packb([name, values | {"version": 99, "color": "blue"}])
    hello = unpack(data)
    assert isinstance(hello, Hello)
    assert hello.version == 99


def test_a_side_hangs_up_in_words_and_acknowledges_what_it_received():
    one, other = Session(), Session()
    one.put(b"last")
    other.take(one.frame())
    assert one.take(other.goodbye()) is None
    assert (one.has_hung_up, one.is_delivered) == (True, True)
    assert not other.has_hung_up
