"""Floods of SET and GET: executed as one, answered as if one by one."""

from __future__ import annotations

import pytest

from echelon.store import StoreServer
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from tests.store.peers import Raw, ours, until


def gets(keys):
    return b"".join(p.encode(p.GET, key) for key in keys)


def sets(keys, value):
    return b"".join(p.encode(p.SET, key, value) for key in keys)


KEYS = [b"/key/%02d" % number for number in range(40)]


@pytest.mark.parametrize("value", [b"", b"v", bytes(5000)])
def test_a_run_stores_and_returns_what_single_commands_would(raw, value):
    peer = raw()
    peer.send(sets(KEYS, value), gets(KEYS))
    assert [peer.take_string() for _ in KEYS] == [value] * len(KEYS)


def test_values_of_different_lengths_and_missing_ones_are_told_apart(raw):
    peer = raw()
    values = [b"x" * (number % 3) for number in range(len(KEYS))]
    for key, value in zip(KEYS[1:], values[1:], strict=True):
        peer.send(p.encode(p.SET, key, value))
    peer.send(gets(KEYS))
    assert [peer.take_string() for _ in KEYS] == [b"", *values[1:]]


def test_a_run_of_sets_wakes_waiters_and_watches(raw, raw_ours):
    waiter, watcher, writer = raw_ours(), raw_ours(), raw()
    waiter.send(p.tagged(p.AWAIT_GET, 1, KEYS[7]))
    watcher.send(p.tagged(p.WATCH, 1, [KEYS[9]]))
    assert watcher.take_frame() == (p.OK, b"")
    writer.send(sets(KEYS, b"v"))
    assert waiter.take_frame() == (p.OK, b"v")
    assert watcher.take_frame() == (p.EVENT, b"\x01" + p.pack_strings((KEYS[9], b"v")))


def test_a_run_obeys_the_limit_of_keys(caplog):
    with StoreServer(limits=Limits(num_keys=20)) as server, Raw(server.port) as peer:
        peer.send(sets(KEYS, b"v"))
        assert peer.is_closed_by_server()
        assert server.statistics().num_keys == 20
    assert "more than 20 keys" in caplog.text


def test_a_run_of_long_values_waits_for_its_reader():
    limits = Limits(unread_bytes=64 << 10)
    with StoreServer(limits=limits) as server, ours(server.port) as peer, Raw(server.port) as other:
        other.send(p.encode(p.SET, b"/big", bytes(1 << 20)))
        other.sync()
        peer.send(gets([b"/big"] * 300))

        def unread():
            return server._call(lambda hub: max(c.num_unread_bytes for c in hub.connections))

        until(lambda: unread() > 0, "it is on its way")
        assert unread() <= 3 << 20
        for _ in range(300):
            assert len(peer.take_string()) == 1 << 20
