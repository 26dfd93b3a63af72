"""Questions about all keys of a large store: others are served before they are answered."""

from __future__ import annotations

import asyncio
import json

import pytest

from echelon.store.server.slices import SLICE
from echelon.store.wire import protocol as p
from tests.store.worlds import World

NUM_KEYS = 3 * SLICE


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def world(loop):
    made = World(loop)
    made.hub.state.values.update((b"/%06d" % number, b"v") for number in range(NUM_KEYS))
    yield made
    made.hub.close()


def turn(loop) -> None:
    """Run one turn of the loop."""
    loop.call_soon(loop.stop)
    loop.run_forever()


def finish(loop, is_done) -> int:
    """Turn the loop until the condition holds; return how often."""
    for number in range(100):
        if is_done():
            return number
        turn(loop)
    raise AssertionError("no answer within 100 turns")


def test_another_peer_is_served_while_all_keys_are_listed(loop, world):
    asking, asked = world.peer(is_ours=False)
    other, seen = world.peer(is_ours=False)
    asking.data_received(p.encode(p.LIST_KEYS) + p.encode(p.PING, 9))
    assert asked.written == b""
    other.data_received(p.encode(p.SET, b"/later", b"v") + p.encode(p.GET, b"/000001"))
    assert seen.written == p.pack_string(b"v")
    asking.data_received(p.encode(p.GET, b"/later"))
    expected = p.pack_i64(NUM_KEYS) + p.pack_strings(b"/%06d" % n for n in range(NUM_KEYS))
    expected += p.pack_u32(9) + p.pack_string(b"v")
    assert finish(loop, lambda: len(asked.written) >= len(expected)) == NUM_KEYS // SLICE - 1
    assert asked.written == expected


def test_what_comes_after_a_tagged_question_is_answered_after_it(loop, world):
    asking, asked = world.peer(is_ours=True)
    queries = (p.tagged(p.ACK_LIST_KEYS, 1), p.tagged(p.STATISTICS, 2), p.tagged(p.ACK_PING, 3))
    asking.data_received(b"".join(queries))
    last = p.frame(p.OK, 3, b"")
    finish(loop, lambda: asked.written.endswith(last))
    status, tag, length = p.unpack_frame_header(asked.written[: p.FRAME_HEADER_BYTES])
    assert (status, tag) == (p.OK, 1)
    listed, rest = asked.written[p.FRAME_HEADER_BYTES :][:length], asked.written[13 + length :]
    assert len(p.unpack_strings(listed)) == NUM_KEYS
    status, tag, length = p.unpack_frame_header(rest[: p.FRAME_HEADER_BYTES])
    assert (status, tag) == (p.OK, 2)
    assert json.loads(rest[13 : 13 + length])["value_bytes"] == NUM_KEYS
    assert rest[13 + length :] == last


def test_a_peer_that_leaves_before_its_answer_leaves_nothing(loop, world):
    asking, asked = world.peer(is_ours=False)
    asking.data_received(p.encode(p.LIST_KEYS))
    asking.connection_lost(None)
    for _ in range(5):
        turn(loop)
    assert asked.written == b""
    assert not world.hub.connections


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_list_longer_than_a_reply_may_be_is_refused(loop, is_ours):
    world = World(loop, reply_bytes=15 * SLICE)
    world.hub.state.values.update((b"/%06d" % number, b"v") for number in range(NUM_KEYS))
    asking, asked = world.peer(is_ours=is_ours)
    asking.data_received(p.tagged(p.ACK_LIST_KEYS, 1) if is_ours else p.encode(p.LIST_KEYS))
    if is_ours:
        finish(loop, lambda: asked.written)
        assert asked.written.startswith(bytes((p.ERROR,)))
    else:
        finish(loop, lambda: asked.is_closed)
        assert asked.written == b""
    world.hub.close()
