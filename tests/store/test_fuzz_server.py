"""A real server under broken traffic: it lives on, serves others, and no key is harmed."""

from __future__ import annotations

import random

from echelon.store import StoreServer
from echelon.store.wire import protocol as p
from tests.store.peers import OPENING, Raw, all_have_left, ours, until

GUARDED = b"/guarded"


def valid_traffic(rng: random.Random) -> bytes:
    """Commands of all kinds on keys of its own; nothing that touches the guarded key."""
    key = b"/fuzz/%d" % rng.randrange(5)
    value = rng.randbytes(rng.randrange(200))
    number = rng.randrange(1, 4)
    return rng.choice(
        [
            p.encode(p.SET, key, value),
            p.encode(p.COMPARE_SET, key, value, b"x"),
            p.encode(p.GET, key),
            p.encode(p.ADD, b"/count", number),
            p.encode(p.CHECK, [key, b"/none"]),
            p.encode(p.WAIT, [key, b"/none"]),
            p.encode(p.DELETE_KEY, key),
            p.encode(p.APPEND, key, value),
            p.encode(p.MULTI_GET, [key] * number),
            p.encode(p.MULTI_SET, [key, value] * number),
            p.encode(p.CANCEL_WAIT),
            p.encode(p.QUEUE_PUSH, key, value),
            p.encode(p.QUEUE_POP, key),
            p.encode(p.LIST_KEYS),
            p.encode(p.BARRIER, key, number),
            p.tagged(p.GATHER, 1, key, 0, number, value),
            p.tagged(p.ARRIVE, 1, key, -1, number),
            p.tagged(p.CANCEL, 1),
            p.tagged(p.ACK_ADD, 1, key, number),
            p.tagged(p.AWAIT_GET, 1, key),
            p.tagged(p.AWAIT_POP, 1, key),
            p.tagged(p.WATCH, 1, [key]),
            p.tagged(p.PRESENCE, 1, key, value, 1000),
            p.tagged(p.HELLO, 1, bytes(32), 2, bytes(16)),
            p.tagged(p.PROOF, 1, value),
        ]
    )


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Cut, flip or replace bytes of valid traffic."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return rng.randbytes(rng.randrange(1, 60))
    at = rng.randrange(len(data))
    middle = bytes((rng.randrange(256),)) * (1 if kind == 2 else rng.randrange(1, 9))
    return data[:at] + middle + data[at + len(middle) :]


def test_broken_traffic_harms_nobody(server):
    rng = random.Random(20261120)
    guard = Raw(server.port)
    guard.send(p.encode(p.SET, GUARDED, b"untouched"))
    guard.sync()
    opening = OPENING + p.encode(p.PING, p.OUR_NONCE)
    for number in range(250):
        data = b"".join(valid_traffic(rng) for _ in range(rng.randrange(1, 6)))
        data = spoil(rng, data if number % 3 == 0 else opening + data)
        with Raw(server.port, opening=b"" if number % 3 else opening) as peer:
            at = 0
            try:
                while at < len(data):
                    size = rng.randrange(1, 80)
                    peer.send(data[at : at + size])
                    at += size
            except OSError:
                pass  # closed for what it sent
        guard.send(p.encode(p.GET, GUARDED))
        assert guard.take_string() == b"untouched"
    all_have_left(server, num_staying=1)
    until(lambda: server.statistics().num_presences == 0, "the leases have run out")
    statistics = server.statistics()
    assert statistics.num_waiters == 0
    assert statistics.num_watched_keys == 0
    guard.close()


def test_every_prefix_of_a_session_leaves_no_trace(server):
    """A peer may die after any byte of its traffic."""
    session = OPENING + b"".join(
        [
            p.encode(p.PING, p.OUR_NONCE),
            p.tagged(p.HELLO, 1, bytes(32), p.EXTENSION_VERSION, bytes(16)),
            p.tagged(p.PRESENCE, 1, b"/here", b"1", 1000),
            p.tagged(p.WATCH, 1, [b"/here"]),
            p.tagged(p.GATHER, 2, b"/g", 0, 2, b"v"),
            p.tagged(p.ARRIVE, 3, b"/b", 1, 2),
            p.tagged(p.AWAIT_POP, 4, b"/q"),
            p.encode(p.WAIT, [b"/never"]),
        ]
    )
    for size in range(len(session) + 1):
        peer = Raw(server.port, opening=session[:size])
        peer.reset() if size % 2 else peer.close()
    all_have_left(server)
    until(lambda: server.statistics().num_presences == 0, "the lease has run out")
    statistics = server.statistics()
    assert statistics.num_keys == statistics.num_waiters == statistics.num_presences == 0


def test_a_reply_is_never_mixed_up_under_interleaved_splits():
    """Many connections, each cut at other places: each reads exactly its own values."""
    rng = random.Random(7)
    with StoreServer() as server:
        peers = [ours(server.port) for _ in range(8)]
        streams = []
        for index, _ in enumerate(peers):
            sets = [
                p.encode(p.SET, b"/%d/%d" % (index, i), b"%d-%d" % (index, i)) for i in range(40)
            ]
            gets = [p.encode(p.GET, b"/%d/%d" % (index, i)) for i in range(40)]
            streams.append(b"".join(sets + gets))
        at = [0] * len(peers)
        while any(a < len(s) for a, s in zip(at, streams, strict=True)):
            index = rng.randrange(len(peers))
            size = rng.randrange(1, 300)
            peers[index].send(streams[index][at[index] : at[index] + size])
            at[index] += size
        for index, peer in enumerate(peers):
            for i in range(40):
                assert peer.take_string() == b"%d-%d" % (index, i)
            peer.close()
