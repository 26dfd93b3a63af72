"""Plain commands in C: every reply and every key as the handlers in Python make them."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.store.server import native
from echelon.store.server.peer import Peer
from echelon.store.wire import protocol as p
from tests.store.peers import OPENING, SYNC, SYNCED
from tests.store.worlds import Transport, World

pytestmark = pytest.mark.skipif(not native.available(), reason="the C core was not built")

LIMITS = {"key_bytes": 40, "value_bytes": 9000, "num_keys": 6, "num_waiters": 3}
SETTINGS = settings(derandomize=True, max_examples=100, deadline=None, database=None)
KEYS = [b"/plain", b"/awaited", b"/watched", b"/leased", b"/queue", b"/number", b"/text", b""]


class Beside(World):
    """A hub with one peer under test and one that waits, watches and holds a lease."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, in_c: bool, is_ours: bool) -> None:
        super().__init__(loop, in_c=in_c, **LIMITS)
        self.other, self.seen_by_other = self.peer(is_ours=True)
        self.other.data_received(
            p.tagged(p.HELLO, 1, bytes(32), p.EXTENSION_VERSION, bytes(16))
            + p.tagged(p.ACK_SET, 0, b"/text", b"not a number")
            + p.tagged(p.ACK_PUSH, 0, b"/queue", b"item")
            + p.tagged(p.AWAIT_GET, 2, b"/awaited")
            + p.tagged(p.WATCH, 3, [b"/watched"])
            + p.tagged(p.PRESENCE, 4, b"/leased", b"1", 60_000)
        )
        self.tested, self.seen = self.peer(is_ours=is_ours)
        self.is_ours = is_ours

    def end(self) -> tuple[object, ...]:
        """Return all that can be seen from outside, and let the hub go."""
        state = self.hub.state
        replies = self.seen_by_other.written
        # An instance is random: it is in the answer to HELLO.
        replies = replies.replace(self.hub.instance, bytes(16))
        # A wait's answer has no place among the others, so ours are compared without their order.
        written = bytes(sorted(self.seen.written)) if self.is_ours else self.seen.written
        seen = (
            written, self.seen.is_closed, by_tag(replies), dict(state.values),
            {key: list(queue) for key, queue in state.queues.items()}, state.num_waiters(),
        )  # fmt: skip
        self.hub.close()
        return seen


def by_tag(frames: bytes) -> dict[int, list[tuple[int, bytes]]]:
    """Sort answers by their queries: only those of one query have an order."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    start = 0
    while start < len(frames):
        body = start + p.FRAME_HEADER_BYTES
        status, tag, length = p.unpack_frame_header(frames[start:body])
        found.setdefault(tag, []).append((status, frames[body : body + length]))
        start = body + length
    return found


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


keys = st.sampled_from(KEYS)
values = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"7", b"-12", b"007", b"9" * 18, b"9" * 19, b" 5", b"1_0", b"-", bytes(5000)]),
)
numbers = st.one_of(st.integers(-9, 9), st.integers(-(1 << 63), (1 << 63) - 1))
tags = st.sampled_from([0, 1, 2, 0xFFFFFFFF])
key_lists = st.one_of(keys.map(lambda key: [key]), st.lists(keys, max_size=3))

plain = st.one_of(
    st.tuples(st.just(p.SET), keys, values),
    st.tuples(st.just(p.GET), keys),
    st.tuples(st.just(p.ADD), keys, numbers),
    st.tuples(st.just(p.CHECK), key_lists),
    st.tuples(st.just(p.WAIT), key_lists),
)
tagged = st.one_of(
    st.tuples(st.just(p.ACK_SET), tags, keys, values),
    st.tuples(st.just(p.GET_IF), tags, keys),
    st.tuples(st.just(p.AWAIT_GET), tags, keys),
    st.tuples(st.just(p.ACK_ADD), tags, keys, numbers),
    st.tuples(st.just(p.CHECK_EACH), tags, key_lists),
    st.tuples(st.just(p.AWAIT), tags, key_lists),
)
rare = st.one_of(
    st.tuples(st.sampled_from([p.DELETE_KEY, p.QUEUE_POP]), keys),
    st.tuples(st.just(p.QUEUE_PUSH), keys, values),
    st.tuples(st.just(p.CANCEL_WAIT)),
    st.tuples(st.just(p.CANCEL), tags),
)


def traffic_of(command):
    """Runs of commands, several in a row alike."""
    runs = st.tuples(command, st.integers(1, 12)).map(lambda pair: [pair[0]] * pair[1])
    return st.lists(runs, max_size=8).map(lambda found: [m for run in found for m in run])


torchs = traffic_of(plain)
everything = traffic_of(st.one_of(plain, tagged, tagged, rare))
cuts = st.lists(st.integers(0, 3000), max_size=8)


def encoded(messages: list[p.Message]) -> bytes:
    return b"".join((p.tagged if m[0] >= p.TAGGED else p.encode)(*m) for m in messages)


def seen(loop, data: bytes, at: list[int], *, in_c: bool, is_ours: bool) -> tuple[object, ...]:
    world = Beside(loop, in_c=in_c, is_ours=is_ours)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in at), len(data)]
    for start, end in itertools.pairwise(edges):
        if start < end and not world.seen.is_closed:
            world.tested.data_received(data[start:end])
    return world.end()


def assert_alike(loop, data: bytes, at: list[int], *, is_ours: bool) -> None:
    in_c = seen(loop, data, at, in_c=True, is_ours=is_ours)
    assert in_c == seen(loop, data, at, in_c=False, is_ours=is_ours)


@SETTINGS
@given(torchs, cuts)
def test_it_answers_torchs_commands_as_the_handlers_do(loop, sent, at):
    assert_alike(loop, encoded(sent), at, is_ours=False)


@SETTINGS
@given(everything, cuts)
def test_it_answers_ours_as_the_handlers_do(loop, sent, at):
    assert_alike(loop, encoded(sent), at, is_ours=True)


@SETTINGS
@given(everything, st.binary(max_size=40), st.integers(0, 2000), cuts, st.booleans())
def test_broken_streams_end_as_they_do_in_python(loop, sent, noise, where, at, is_ours):
    data = encoded(sent)
    where %= len(data) + 1
    data = data[:where] + noise + data[where + len(noise) :]
    assert_alike(loop, data, at, is_ours=is_ours)


def test_it_executes_plain_commands_itself(loop):
    """The comparison above would also hold for an executor that leaves all to Python."""
    world = Beside(loop, in_c=True, is_ours=True)
    executor = world.hub.executor
    data = encoded(
        [
            (p.SET, b"/plain", b"v"), (p.GET, b"/plain"), (p.ADD, b"/number", 3),
            (p.CHECK, [b"/queue"]), (p.WAIT, [b"/plain"]), (p.ACK_SET, 5, b"/plain", b"w"),
            (p.GET_IF, 6, b"/none"), (p.ACK_ADD, 7, b"/number", -1), (p.CHECK_EACH, 8, [b"/none"]),
            (p.AWAIT, 9, [b"/plain"]), (p.AWAIT_GET, 10, b"/plain"),
        ]
    )  # fmt: skip
    end, replies = executor(data, 0, True)
    assert end == len(data)
    assert replies == b"".join(
        [
            p.pack_string(b"v"), p.pack_i64(3), p.CHECK_PRESENT, p.WAIT_DONE, p.frame(p.OK, 5, b""),
            p.frame(p.NOTHING, 6, b""), p.frame(p.OK, 7, p.pack_i64(2)), p.frame(p.OK, 8, b"\x00"),
            p.frame(p.OK, 9, b""), p.frame(p.OK, 10, b"w"),
        ]
    )  # fmt: skip
    plain_end = len(encoded([(p.SET, b"/plain", b"v")]))
    assert executor(data[:plain_end] + data[-30:], 0, False)[0] == plain_end
    world.hub.close()


@pytest.mark.parametrize(
    "message",
    [
        (p.SET, b"/awaited", b"v"),
        (p.SET, b"/watched", b"v"),
        (p.ADD, b"/leased", 1),
        (p.ADD, b"/text", 1),
        (p.SET, bytes(41), b"v"),
        (p.SET, b"/plain", bytes(9001)),
        (p.WAIT, [b"/none"]),
        (p.CHECK, [b"/plain", b"/plain"]),
        (p.AWAIT_GET, 1, b"/none"),
        (p.GET_IF, 0, b"/text"),
        (p.LIST_KEYS,),
    ],
)
def test_what_needs_more_than_plain_keys_is_left_to_python(loop, message):
    world = Beside(loop, in_c=True, is_ours=True)
    before = dict(world.hub.state.values)
    assert world.hub.executor(encoded([message]), 0, True) == (0, b"")
    assert world.hub.state.values == before
    world.hub.close()


def test_replies_leave_in_portions_that_the_peer_can_refuse(loop):
    """Gets of long values are answered 256 KiB at a time, and no more while the peer is full."""
    world = Beside(loop, in_c=True, is_ours=False)
    world.tested.data_received(encoded([(p.SET, b"/plain", bytes(4000))]))
    pack = encoded([(p.GET, b"/plain")] * 500)

    world.seen.on_write = world.tested.pause_writing
    world.seen.written = b""
    world.tested.data_received(pack)
    portion = len(world.seen.written)
    assert 256 << 10 <= portion <= (256 << 10) + 4008
    for _ in range(10):
        world.tested.resume_writing()
    assert len(world.seen.written) == 500 * 4008
    world.hub.close()


class Wired(Transport):
    """A transport with a socket, into which it hands nothing by itself."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self.end = end
        self.num_queued = 0

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.end if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.num_queued


@pytest.fixture
def wired(loop):
    """A world, a torch client's peer in it, its transport and the far end of its socket."""
    world = World(loop)
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(20.0)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport = Wired(near)
        peer = Peer(world.hub)
        peer.connection_made(transport)
        peer.data_received(OPENING + SYNC + encoded([(p.SET, b"/plain", b"v")]))
        assert transport.written == SYNCED, "Python's replies leave through the transport"
        transport.written = b""
        yield peer, transport, far
        world.hub.close()


def test_replies_are_sent_past_an_empty_transport(wired):
    peer, transport, far = wired
    peer.data_received(encoded([(p.GET, b"/plain")]))
    assert far.recv(100) == p.pack_string(b"v")
    assert transport.written == b""


def test_replies_are_queued_behind_what_the_transport_still_has(wired):
    peer, transport, far = wired
    transport.num_queued = 1
    peer.data_received(encoded([(p.GET, b"/plain")]))
    assert transport.written == p.pack_string(b"v")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)


def test_the_transport_is_asked_again_after_each_write_of_pythons(wired):
    """Between two such writes its queue cannot grow, and the question costs as much as a lookup."""
    peer, transport, far = wired
    questions = []
    transport.get_write_buffer_size = lambda: questions.append(1) or transport.num_queued
    peer._receiver.num_queued = transport.get_write_buffer_size
    get, answer = encoded([(p.GET, b"/plain")]), p.pack_string(b"v")
    for _ in range(3):
        peer.data_received(get)
        assert far.recv(100) == answer
    assert len(questions) == 1
    peer.out.put(b"x")
    peer.flush()
    transport.num_queued = 1
    for _ in range(2):
        peer.data_received(get)
    assert (transport.written, len(questions)) == (b"x" + answer * 2, 3)
    transport.num_queued = 0
    peer.data_received(get)
    assert far.recv(100) == answer


@pytest.mark.parametrize("number", [0, 9, 10, -1, -10, (1 << 63) - 1, -(1 << 63)])
def test_sums_are_written_in_decimal(loop, number):
    world = Beside(loop, in_c=True, is_ours=False)
    data = encoded([(p.ADD, b"/plain", number)])
    assert world.hub.executor(data, 0, False) == (len(data), p.pack_i64(number))
    assert world.hub.state.values[b"/plain"] == str(number).encode()
    world.hub.close()


def test_what_the_kernel_does_not_take_is_left_to_the_transport(wired):
    peer, transport, far = wired
    peer.data_received(encoded([(p.SET, b"/plain", b"abcdefg" * 500)]))
    peer.data_received(encoded([(p.GET, b"/plain")] * 60))
    assert 0 < len(transport.written) < 60 * 3508
    sent = b""
    while len(sent) < 60 * 3508 - len(transport.written):
        sent += far.recv(1 << 20)
    assert sent + transport.written == p.pack_string(b"abcdefg" * 500) * 60


def test_an_error_of_the_socket_is_left_to_the_transport(wired):
    peer, transport, far = wired
    far.close()
    peer.data_received(encoded([(p.GET, b"/plain")]))
    assert transport.written == p.pack_string(b"v")


def test_bad_calls_are_errors(loop):
    world = Beside(loop, in_c=True, is_ours=False)
    executor = world.hub.executor
    with pytest.raises(TypeError, match="executor"):
        executor(bytearray(b"\x01"), 0, False)
    with pytest.raises(TypeError, match="executor"):
        executor(b"\x01")
    with pytest.raises(ValueError, match="position 2 of 1 bytes"):
        executor(b"\x01", 2, False)
    world.hub.close()
