"""A peer with much to do: others have their turn in between, and nothing is answered otherwise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from echelon.store.server.turns import Turns
from echelon.store.wire import protocol as p
from echelon.store.wire.seal import Opener, Sealer
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


@pytest.mark.parametrize(
    "messages",
    [
        [(p.LIST_KEYS,)] + [(p.PING, number) for number in range(9000)],
        [(p.PING, number) for number in range(9000)] + [(p.LIST_KEYS,), (p.PING, 1)],
        [(p.APPEND, b"/log", b"%d" % number) for number in range(2000)],
    ],
    ids=["list first", "list last", "appends"],
)
def test_a_peer_waits_for_one_turn_at_a_time(loop, messages):
    """A second place in the queue would carry on while an answer is still made in slices."""
    data = b"".join(p.encode(*message) for message in messages)
    written = []
    for clock in (lambda: 0.0, ticking()):
        world = World(loop, in_c=False, clock=clock)
        world.hub.state.values.update((b"/%06d" % number, b"v") for number in range(25_000))
        peer, transport = listening(world, is_ours=False)
        peer.data_received(data)
        while not transport.is_read:
            assert len(world.hub.turns._waiting) == 1
            world.turn()
        written.append(transport.written + world.hub.state.values.get(b"/log", b""))
        world.hub.close()
    assert written[0] == written[1]


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


class Slow(Transport):
    """A transport that holds what it is given until it is drained, as a busy network's does."""

    held = 0

    def write(self, data: bytes) -> None:
        self.held += len(data)
        super().write(data)
        if self.held > 1 << 20:
            self.peer.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.held


def test_a_long_reply_is_sealed_as_fast_as_it_is_read(loop):
    world = World(loop)
    peer, _ = listening(world, is_ours=True)
    slow = Slow()
    slow.peer, peer._transport, peer.out.transport = peer, slow, slow
    key = b"k" * 32
    peer.seal(key, key)
    peer._leave_plain()
    world.hub.state.values[b"/big"] = value = bytes(range(256)) * (1 << 15)
    asked = p.tagged(p.AWAIT_MULTI_GET, 5, [b"/big"] * 2) + p.tagged(p.ACK_PING, 6)
    peer.data_received(Sealer(key).seal(asked))
    world.turn()
    world.turn()
    num_waits = 0
    while slow.held:
        assert slow.held <= (1 << 20) + (300 << 10)
        slow.held = 0
        num_waits += 1
        peer.resume_writing()
        world.turn()
    assert num_waits > 10
    answer = p.frame(p.OK, 5, p.pack_strings([value, value])) + p.frame(p.OK, 6)
    assert Opener(key).open(slow.written) == answer
    world.hub.close()


def test_a_flood_of_deliveries_is_made_in_slices(loop):
    world = World(loop, clock=ticking())
    waiting, transport = listening(world, is_ours=True)
    for tag in range(1, 1001):
        waiting.data_received(p.tagged(p.AWAIT_GET, tag, b"/gate"))
        work_off(world, transport)
    other, _ = listening(world, is_ours=True)
    other.data_received(p.encode(p.SET, b"/gate", b"v"))
    frame_bytes = len(p.frame(p.OK, 1, b"v"))
    assert 0 < len(transport.written) < 500 * frame_bytes
    num_turns = 0
    while len(transport.written) < 1000 * frame_bytes:
        world.turn()
        num_turns += 1
        assert num_turns < 100
    assert num_turns > 1
    assert transport.written == b"".join(p.frame(p.OK, tag, b"v") for tag in range(1, 1001))
    world.hub.close()


def test_a_wait_that_ended_before_its_cancel_is_answered_before_it(loop):
    """torch's client reads a byte after CANCEL_WAIT, and another only if that one says "done"."""
    world = World(loop, clock=ticking())
    peers = [listening(world, is_ours=False) for _ in range(300)]
    for peer, _ in peers:
        peer.data_received(p.encode(p.WAIT, [b"/gate"]))
    other, _ = listening(world, is_ours=False)
    other.data_received(p.encode(p.SET, b"/gate", b"v"))
    last, transport = peers[-1]
    assert transport.written == b"", "its answer is put off"
    last.data_received(p.encode(p.CANCEL_WAIT))
    for _ in range(100):
        world.turn()
    assert transport.written == p.WAIT_DONE + p.WAIT_CANCELLED
    assert all(seen.written == p.WAIT_DONE for _, seen in peers[:-1])
    world.hub.close()


def test_many_values_are_set_as_one_by_one(loop):
    """Each with its waiter, watch and presence."""
    pairs = [(b"/plain", b"1"), (b"/awaited", b"2"), (b"/watched", b"3"), (b"/leased", b"4")]
    found = []
    for is_one_command in (True, False):
        world = World(loop)
        other, seen = listening(world, is_ours=True)
        for message in (
            (p.HELLO, 1, bytes(32), p.EXTENSION_VERSION, bytes(16)),
            (p.PRESENCE, 2, b"/leased", b"0", 60_000),
            (p.AWAIT_GET, 3, b"/awaited"),
            (p.WATCH, 4, [b"/watched"]),
        ):
            other.data_received(p.tagged(*message))
        seen.written = b""
        peer, _ = listening(world, is_ours=False)
        if is_one_command:
            peer.data_received(p.encode(p.MULTI_SET, [text for pair in pairs for text in pair]))
        else:
            peer.data_received(b"".join(p.encode(p.SET, *pair) for pair in pairs))
        state = world.hub.state
        found.append(
            (seen.written, dict(state.values), dict(state.present_by), dict(state.waiting))
        )
        world.hub.close()
    assert found[0] == found[1]
    event = b"\x01" + p.pack_strings([b"/watched", b"3"])
    assert found[0][0] == p.frame(p.EVENT, 4, event) + p.frame(p.OK, 3, b"2")
    assert found[0][1:] == (dict(pairs), {}, {})


def test_a_client_that_was_reset_before_it_was_accepted_leaves_at_once(loop):
    """The kernel names no end of such a connection, so there is no user to ask about."""
    world = World(loop)
    world.hub.secret = b"correct horse battery staple"
    peer, transport = listening(world, is_ours=False)
    assert not transport.is_closed
    world.turn()
    assert transport.is_closed
    assert peer not in world.hub.connections
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
