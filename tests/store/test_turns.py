"""A peer with much to do: others have their turn in between, and nothing is answered otherwise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from echelon.store.server.turns import Turns
from echelon.store.wire import protocol as p
from tests.store.worlds import Transport, World

STEP_S = 0.0004  # per look at the clock: a slice is over after three


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def ticking():
    """Return a clock that goes on by a step whenever it is looked at."""
    steps = itertools.count()
    return lambda: next(steps) * STEP_S


class Listening(Transport):
    """A transport that notes whether the server reads."""

    is_read = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


def listening(world: World, *, is_ours: bool):
    peer, _ = world.peer(is_ours=is_ours)
    transport = Listening()
    peer._transport = peer.out.transport = transport
    if peer._receiver is not None:
        peer._receiver.write = transport.write
    return peer, transport


def work_off(world: World, transport: Listening) -> int:
    """Turn the loop until the peer is read again or closed; return how many turns it took."""
    for number in range(10_000):
        if transport.is_read or transport.is_closed:
            return number
        world.turn()
    raise AssertionError("the server does not read again")


FLOODS = {
    "appends": [(p.APPEND, b"/log", b"x")] * 200 + [(p.GET, b"/log")],
    "adds": [(p.COMPARE_SET, b"/n", b"", b"0"), (p.ADD, b"/n", 1), (p.DELETE_KEY, b"/n")] * 50,
    "cancels": [(p.CANCEL_WAIT,)] * 200,
    "queues": [(p.QUEUE_PUSH, b"/q", b"%d" % i) for i in range(60)] + [(p.QUEUE_POP, b"/q")] * 60,
    "many bytes": [(p.APPEND, b"/log", bytes(5000))] * 40 + [(p.QUEUE_LEN, b"/log")],
    "then a violation": [(p.QUEUE_LEN, b"/q")] * 50 + [(p.ADD, b"/text", 1)] + [(p.PING, 1)] * 50,
}


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_executed_in_slices_with_the_same_replies(loop, name, in_c):
    data = b"".join(p.encode(*message) for message in FLOODS[name])
    found = []
    for clock in (lambda: 0.0, ticking()):
        world = World(loop, in_c=in_c, clock=clock)
        world.hub.state.set(b"/text", b"no number")
        peer, transport = listening(world, is_ours=False)
        peer.data_received(data)
        if clock() > 0.0:
            assert not transport.is_read
            assert not transport.is_closed
            assert work_off(world, transport) > 5
        state = world.hub.state
        found.append((transport.written, transport.is_closed, state.values, state.queues))
        world.hub.close()
    assert found[0] == found[1]


def test_others_are_served_between_the_slices(loop):
    world = World(loop, in_c=False, clock=ticking())
    peer, transport = listening(world, is_ours=False)
    other, seen = listening(world, is_ours=False)
    peer.data_received(p.encode(p.APPEND, b"/log", b"x") * 100 + p.encode(p.QUEUE_LEN, b"/log"))
    answered = 0
    while not transport.is_read:
        world.turn()
        length = len(world.hub.state.values[b"/log"])
        other.data_received(p.encode(p.GET, b"/log"))
        answered += 1
        assert seen.written.endswith(p.pack_string(b"x" * length))
    assert answered > 10
    assert transport.written == p.pack_i64(0)
    world.hub.close()


def test_several_floods_take_turns(loop):
    world = World(loop, clock=ticking())
    flood = p.encode(p.QUEUE_LEN, b"/q") * 60
    peers = [listening(world, is_ours=False) for _ in range(3)]
    for peer, _ in peers:
        peer.data_received(flood)
    most_apart = 0
    while not all(transport.is_read for _, transport in peers):
        world.turn()
        done = [len(transport.written) // 8 for _, transport in peers]
        most_apart = max(most_apart, max(done) - min(done))
    assert [len(transport.written) for _, transport in peers] == [60 * 8] * 3
    assert most_apart < 20
    world.hub.close()


def test_what_arrives_meanwhile_comes_after_the_rest(loop):
    """A transport may hand over what it had read before it was told to stop."""
    world = World(loop, in_c=False, clock=ticking())
    peer, transport = listening(world, is_ours=False)
    commands = [p.encode(p.APPEND, b"/log", b"%d," % number) for number in range(40)]
    peer.data_received(b"".join(commands[:30]))
    assert not transport.is_read
    peer.data_received(commands[30][:5])
    peer.data_received(commands[30][5:] + b"".join(commands[31:]))
    work_off(world, transport)
    assert world.hub.state.values[b"/log"] == b"".join(b"%d," % number for number in range(40))
    world.hub.close()


def test_a_peer_that_dies_in_the_middle_of_its_flood_ends_it(loop):
    world = World(loop, clock=ticking())
    peer, _ = listening(world, is_ours=False)
    peer.data_received(p.encode(p.APPEND, b"/log", b"x") * 100)
    peer.connection_lost(None)
    length = len(world.hub.state.values[b"/log"])
    for _ in range(50):
        world.turn()
    assert len(world.hub.state.values[b"/log"]) == length < 100
    world.hub.close()


def test_a_stranger_floods_in_slices_too(loop):
    world = World(loop, clock=ticking())
    world.hub.secret = b"correct horse battery staple"
    peer, transport = listening(world, is_ours=True)
    peer.data_received(p.encode(p.PING, 1) * 20_000)
    assert not transport.is_read
    assert work_off(world, transport) > 1
    assert transport.written == p.pack_u32(1) * 20_000
    world.hub.close()


def test_work_that_fails_does_not_stop_the_others(loop):
    turns, done = Turns(loop, ticking()), []
    loop.set_exception_handler(lambda *_: done.append("error"))
    turns.put_off(lambda: 1 / 0)
    turns.put_off(lambda: done.append("work"))
    for _ in range(3):
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert done == ["error", "work"]
