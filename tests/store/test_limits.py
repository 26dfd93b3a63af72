"""What one peer can cost the server, and that it costs the others nothing."""

from __future__ import annotations

import logging
import select
from dataclasses import replace

import pytest

from echelon.store import StoreServer
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from tests.store.peers import OPENING, Background, Raw, all_have_left, ours, until

QUICK = Limits(
    key_bytes=64,
    value_bytes=4096,
    num_keys=50,
    num_connections=4,
    num_waiters=10,
    unread_bytes=64 << 10,
    handshake_s=60.0,
    command_s=60.0,
)


@pytest.fixture
def strict():
    with StoreServer(limits=QUICK) as server:
        yield server


@pytest.fixture
def hasty():
    """A server that gives its peers next to no time: a machine that stands still takes it all."""
    with StoreServer(limits=replace(QUICK, handshake_s=0.2, command_s=0.2)) as server:
        yield server


def let_pass(server, seconds: float) -> None:
    """Let so much time pass for a server's connections, and let it look at the clock."""

    def shift(hub):
        for connection in hub.connections:
            connection.since -= seconds
        hub._sweep()

    server._call(shift)


def refusal(caplog):
    return [record.message for record in caplog.records if record.name == "echelon.store"]


@pytest.mark.parametrize(
    ("traffic", "why"),
    [
        (p.encode(p.SET, b"k" * 65, b""), "the key has 65 bytes, but the limit is 64"),
        (p.encode(p.SET, b"k", bytes(4097)), "the value has 4097 bytes, but the limit is 4096"),
        (p.encode(p.APPEND, b"k", bytes(4096)) * 2, "would be 8192 bytes long"),
        (b"".join(p.encode(p.SET, b"%d" % i, b"") for i in range(51)), "more than 50 keys"),
        (p.encode(p.MULTI_SET, [x for i in range(51) for x in (b"%d" % i, b"")]), "more than 50"),
        (b"".join(p.encode(p.QUEUE_PUSH, b"%d" % i, b"") for i in range(51)), "more than 50"),
        (p.encode(p.WAIT, [b"never"]) * 11, "more than 10 open waits"),
        (p.encode(p.BARRIER, b"b", 0), "world size 0"),
        (p.encode(p.BARRIER, b"b", 1 << 60), "or world size 1152921504606846976"),
        (
            p.encode(p.BARRIER, b"b", 3) + p.encode(p.BARRIER, b"b", 2),
            "but other ranks are already waiting",
        ),
        (OPENING, "unknown query 0x00"),
    ],
)
def test_who_breaks_a_limit_is_closed_with_the_reason(strict, caplog, traffic, why):
    with caplog.at_level(logging.WARNING, "echelon.store"), Raw(strict.port) as other:
        other.sync()
        with Raw(strict.port) as peer:
            peer.send(traffic)
            assert peer.is_closed_by_server()
        other.sync()
    assert len(refusal(caplog)) == 1
    assert why in refusal(caplog)[0]
    statistics = strict.statistics()
    assert statistics.num_refused == 1
    assert statistics.num_keys <= 50


def test_replies_earned_before_the_violation_still_come(strict):
    with Raw(strict.port) as peer:
        peer.send(p.encode(p.SET, b"k", b"v"), p.encode(p.GET, b"k"), b"\xee")
        assert peer.take_string() == b"v"
        assert peer.is_closed_by_server()


@pytest.mark.parametrize("opening", [b"", OPENING[:3], OPENING])
def test_who_never_becomes_a_member_is_closed(hasty, caplog, opening):
    with Raw(hasty.port, opening=opening) as peer:
        assert peer.is_closed_by_server()
    assert "no handshake within 0.2 s" in refusal(caplog)[0]


def test_who_stops_inside_a_command_is_closed(hasty, caplog):
    with Raw(hasty.port) as peer:
        peer.sync()
        peer.send(p.encode(p.SET, b"k", b"value")[:-1])
        assert peer.is_closed_by_server()
    assert "a command is still incomplete after" in refusal(caplog)[0]


def test_dribbling_bytes_buys_no_time(hasty, caplog):
    """Slow loris: a byte now and then inside one command."""
    command = p.encode(p.SET, b"k", bytes(4000))

    def dribble():
        with Raw(hasty.port) as peer:
            peer.sync()
            for at in range(len(command)):
                peer.send(command[at : at + 1])
                if select.select([peer.socket], [], [], 0.01)[0]:
                    return at
        return len(command)

    assert dribble() < len(command)
    assert "a command is still incomplete after" in refusal(caplog)[0]


def test_a_command_that_the_server_does_not_read_has_all_the_time_it_needs(closing):
    """A peer stops in the middle of a command while its replies lie unread."""
    limits = Limits(command_s=60.0, unread_bytes=1 << 16)
    with StoreServer(limits=limits) as server, Raw(server.port) as peer:
        peer.send(p.encode(p.SET, b"/k", bytes(8 << 20)))
        peer.sync()
        get = p.encode(p.GET, b"/k")
        peer.send(get * 4, get[:5])
        until(lambda: server._call(lambda hub: any(c.is_deaf for c in hub.connections)), "deaf")
        let_pass(server, 600.0)
        peer.send(get[5:])
        for _ in range(5):
            assert len(peer.take_string()) == 8 << 20
        assert server.statistics().num_refused == 0


def test_an_idle_member_stays(strict):
    with Raw(strict.port) as member, Raw(strict.port, opening=b"") as idler:
        member.sync()
        until(lambda: strict.statistics().num_connections == 2, "both are connected")
        let_pass(strict, 600.0)
        assert idler.is_closed_by_server()
        member.sync()


def test_one_connection_too_many_is_closed_and_its_place_can_be_taken_again(strict, caplog):
    peers = [Raw(strict.port) for _ in range(4)]
    for peer in peers:
        peer.sync()
    with Raw(strict.port) as late:
        assert late.is_closed_by_server()
    assert "server is full" in refusal(caplog)[0]
    peers.pop().close()
    until(lambda: strict.statistics().num_connections == 3, "one has left")
    with Raw(strict.port) as again:
        again.sync()
    for peer in peers:
        peer.close()


def test_a_slow_reader_of_500_mebibytes_costs_a_few(server):
    """Backpressure: the server stops carrying out what a peer asks but does not read."""
    with Raw(server.port) as peer, Raw(server.port) as other:
        peer.send(p.encode(p.SET, b"/big", bytes(1 << 20)))
        peer.sync()
        sending = Background(lambda: peer.send(p.encode(p.GET, b"/big") * 500))
        bound = server._limits.unread_bytes + (1 << 20) + (256 << 10)

        def unread() -> int:
            return server._call(lambda hub: sum(c.num_unread_bytes for c in hub.connections))

        until(lambda: unread() > 0, "replies lie unread")
        for _ in range(20):
            other.sync()  # nobody else waits for the slow one
            assert unread() <= bound
        for _ in range(500):
            assert len(peer.take_string()) == 1 << 20
        sending.result()


def test_a_watch_whose_events_are_not_read_ends(strict):
    watcher = ours(strict.port)
    watcher.send(p.tagged(p.WATCH, 1, [b"/k"]))
    assert watcher.take_frame() == (p.OK, b"")
    with Raw(strict.port) as writer:

        def flood():
            writer.send(p.encode(p.SET, b"/k", bytes(4000)) * 500)
            writer.sync()
            return strict.statistics().num_watched_keys == 0

        until(flood, "the watcher is gone")
    status = p.EVENT
    while status == p.EVENT:
        status, payload = watcher.take_frame()
    assert (status, payload) == (p.ERROR, b"the watch's events were not read")
    watcher.send(p.tagged(p.GET_IF, 1, b"/k"))
    assert watcher.take_frame() == (p.OK, bytes(4000))
    watcher.close()


def test_waits_of_a_peer_that_does_not_read_cost_references(closing):
    """One set that satisfies 400 waits of a slow reader is not copied 400 times."""
    with StoreServer() as server:
        peer = closing(ours(server.port))
        peer.send(*(p.tagged(p.AWAIT_GET, tag, b"/k") for tag in range(1, 401)))
        until(lambda: server.statistics().num_waiters == 400, "all wait")
        with Raw(server.port) as writer:
            writer.send(p.encode(p.SET, b"/k", bytes(1 << 20)))
            writer.sync()

        def unread():
            return server._call(lambda hub: max(c.num_unread_bytes for c in hub.connections))

        until(lambda: unread() > 0, "some is on its way")
        assert unread() <= (4 << 20)
        answered = set()
        for _ in range(400):
            status, tag, length = p.unpack_frame_header(peer.take(p.FRAME_HEADER_BYTES))
            assert (status, length) == (p.OK, 1 << 20)
            assert len(peer.take(length)) == 1 << 20
            answered.add(tag)
        assert answered == set(range(1, 401))


def test_who_closes_without_reading_leaves_no_connection(server):
    for _ in range(5):
        peer = Raw(server.port)
        peer.send(p.encode(p.SET, b"/big", bytes(1 << 20)), p.encode(p.GET, b"/big") * 50)
        peer.reset()
    all_have_left(server)
