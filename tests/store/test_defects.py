"""The sixteen defects of torch's server, each by a test that fails on it.

Raw sockets speak torch's own commands here, so these hold for torch's clients too.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import StoreError
from echelon.store import PrefixStore, StoreServer
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from echelon.store.wire.parser import Parser
from tests.store.peers import OPENING, PATIENCE_S, Background, Raw, until

WAIT_K = p.encode(p.WAIT, [b"/k"])


def barrier(size: int, key: bytes = b"/b") -> bytes:
    return p.encode(p.BARRIER, key, size)


def waiters_are(server, count: int) -> None:
    until(lambda: server.statistics().num_waiters == count, f"{count} waiters")


def test_01_no_name_is_looked_up_for_a_connection(server, raw, monkeypatch):
    def forbidden(*_args, **_kwargs):
        raise AssertionError("a name was looked up")

    for name in ("getnameinfo", "gethostbyaddr", "getfqdn", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, forbidden)
    connected = socket.socket()
    connected.settimeout(20.0)
    connected.connect(("127.0.0.1", server.port))
    connected.sendall(OPENING + p.encode(p.PING, 3))
    assert connected.recv(4) == p.pack_u32(3)
    connected.close()


def test_01_nor_does_the_loop_look_one_up():
    """libuv asks for names on threads of its own, which a server that asks for none lacks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon.store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    port, tasks = int(process.stdout.readline()), Path(f"/proc/{process.pid}/task")
    before = sorted(task.name for task in tasks.iterdir())
    with Raw(port) as first, Raw(port) as second:
        first.sync()
        second.sync()
        assert sorted(task.name for task in tasks.iterdir()) == before
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.parametrize("cut", range(1, len(OPENING)))
def test_02_validate_in_two_packets_is_accepted(raw, cut):
    peer = raw(opening=OPENING[:cut])
    peer.send(OPENING[cut:])
    peer.sync()


def test_03_no_command_passes_without_validate(raw, client):
    peer = raw(opening=b"")
    command = p.encode(p.SET, b"/k", b"stolen")
    peer.send(command[:5])
    peer.send(command[5:])
    assert peer.is_closed_by_server()
    assert not client().check(["k"])


@pytest.mark.parametrize(
    "opening",
    [p.encode(p.VALIDATE, 0x12345678), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64],
)
def test_04_strangers_are_closed_with_a_log_line(raw, opening, caplog):
    with caplog.at_level(logging.WARNING, "echelon.store"):
        assert raw(opening=opening).is_closed_by_server()
    assert "not a store client" in caplog.text


def test_05_compare_set_on_a_missing_key_wakes_nobody(server, raw, client):
    waiting = Background(lambda: client().get("k"))
    waiters_are(server, 1)
    peer = raw()
    peer.send(p.encode(p.COMPARE_SET, b"/k", b"expected", b"desired"))
    assert peer.take_string() == b"expected"
    waiters_are(server, 1)
    peer.send(p.encode(p.SET, b"/k", b"real"))
    assert waiting.result() == b"real"


def test_06_waiters_of_queues_do_not_linger(server, raw):
    popper, pusher = raw(), raw()
    for _ in range(200):
        popper.send(p.encode(p.WAIT, [b"/q"]))
        waiters_are(server, 1)
        pusher.send(p.encode(p.QUEUE_PUSH, b"/q", b"x"))
        assert popper.take(1) == p.WAIT_DONE
        popper.send(p.encode(p.QUEUE_POP, b"/q"))
        assert popper.take(8) == p.pack_i64(1)
        assert popper.take_string() == b"x"
    assert server.statistics().num_waiters == 0
    popper.send(p.encode(p.WAIT, [b"/never"]))
    pusher.send(p.encode(p.QUEUE_PUSH, b"/q", b"x"))
    pusher.sync()
    assert dict(server.statistics().waiting) == {"never": 1}


def test_06_one_push_wakes_one_popper_and_a_dead_one_loses_its_claim(server, raw):
    first, second, pusher = raw(), raw(), raw()
    first.send(p.encode(p.WAIT, [b"/q"]))
    waiters_are(server, 1)
    second.send(p.encode(p.WAIT, [b"/q"]))
    waiters_are(server, 2)
    pusher.send(p.encode(p.QUEUE_PUSH, b"/q", b"only"))
    assert first.take(1) == p.WAIT_DONE
    waiters_are(server, 1)
    first.close()  # without popping
    assert second.take(1) == p.WAIT_DONE
    second.send(p.encode(p.QUEUE_POP, b"/q"))
    assert (second.take(8), second.take_string()) == (p.pack_i64(1), b"only")


def test_07_wait_sees_queues_and_keys_together(raw):
    peer = raw()
    peer.send(p.encode(p.QUEUE_PUSH, b"/q", b"x"), p.encode(p.SET, b"/k", b"y"))
    peer.send(p.encode(p.WAIT, [b"/q", b"/k"]), p.encode(p.CHECK, [b"/q", b"/k"]))
    assert peer.take(2) == p.WAIT_DONE + p.CHECK_PRESENT


def test_08_delete_key_deletes_queues(raw):
    peer = raw()
    peer.send(p.encode(p.QUEUE_PUSH, b"/q", b"x"), p.encode(p.DELETE_KEY, b"/q"))
    assert peer.take(8) == p.pack_i64(1)
    peer.send(p.encode(p.QUEUE_LEN, b"/q"), p.encode(p.CHECK, [b"/q"]))
    assert peer.take(9) == p.pack_i64(0) + p.CHECK_MISSING


def test_09_a_second_round_on_a_barrier_key_needs_all_again(server, raw):
    first, second = raw(), raw()
    for _ in range(3):
        first.send(barrier(2))
        waiters_are(server, 1)
        second.send(barrier(2))
        assert (first.take(1), second.take(1)) == (p.WAIT_DONE, p.WAIT_DONE)


def test_10_a_cancelled_arrival_does_not_count(server, raw):
    first, second, third = raw(), raw(), raw()
    first.send(barrier(2), p.encode(p.CANCEL_WAIT))
    assert first.take(1) == p.WAIT_CANCELLED
    second.send(barrier(2))
    second.sync()
    waiters_are(server, 1)
    third.send(barrier(2))
    assert (second.take(1), third.take(1)) == (p.WAIT_DONE, p.WAIT_DONE)


@pytest.mark.parametrize("leave", [Raw.close, Raw.reset])
def test_11_a_dead_clients_arrival_does_not_count(server, raw, leave):
    first, second, third = raw(), raw(), raw()
    first.send(barrier(2))
    waiters_are(server, 1)
    leave(first)
    waiters_are(server, 0)
    second.send(barrier(2))
    second.sync()
    third.send(barrier(2))
    assert (second.take(1), third.take(1)) == (p.WAIT_DONE, p.WAIT_DONE)


def test_12_a_prefixed_barrier_is_a_barrier(server, client):
    first, second = (PrefixStore("p", client()) for _ in range(2))
    early = Background(lambda: first.barrier("b", 2, rank=0))
    until(lambda: dict(server.statistics().missing_ranks) == {"p/b": (1,)}, "rank 0 at p/b")
    second.barrier("b", 2, rank=1)
    early.result()
    assert second.num_keys() == 0


def test_13_add_on_text_is_an_error_for_us_and_a_clear_log_line_for_torch(client, raw, caplog):
    store = client()
    store.set("k", "abc")
    with pytest.raises(StoreError, match=r"add\('k'\).*contains b'abc', which is not an integer"):
        store.add("k", 1)
    assert store.get("k") == b"abc"
    peer = raw()
    with caplog.at_level(logging.WARNING, "echelon.store"):
        peer.send(p.encode(p.ADD, b"/k", 1))
        assert peer.is_closed_by_server()
    assert "key k contains b'abc', which is not an integer" in caplog.text


def test_14_a_large_command_is_parsed_once_and_carried_out_at_once(server, raw, client):
    """Counts parsed bytes instead of seconds: each byte is cut out a bounded number of times."""
    num_keys = 20_000
    pairs = [piece for i in range(num_keys) for piece in (b"/m/%d" % i, b"value %d" % i)]
    command = p.encode(p.MULTI_SET, pairs)
    peer, store = raw(), client()
    middle = len(command) // 2
    peer.send(command[:middle])
    assert store.num_keys() == 0
    peer.send(command[middle:])
    peer.sync()
    assert store.num_keys() == num_keys

    parser = Parser(Limits())
    parser.feed(OPENING)
    parser.admitted = True
    held = Counted()
    parser._held = held
    touched = 0
    advance = parser._advance

    def counting(data, position, out):
        nonlocal touched
        touched += len(data) - position
        return advance(data, position, out)

    parser._advance = counting
    found = []
    for at in range(0, len(command), 4096):
        found += parser.feed(command[at : at + 4096])
    assert found == [(p.MULTI_SET, pairs)]
    assert touched < 2 * len(command)
    assert held.num_copied < 2 * len(command)
    value = p.encode(p.SET, b"/k", bytes(1 << 20))
    for at in range(0, len(value), 4096):
        parser.feed(value[at : at + 4096])
    assert held.num_copied < 2 * (len(command) + len(value))


class Counted(bytearray):
    """Bytes that count how many of them were put in and taken out."""

    num_copied = 0

    def __iadd__(self, data):
        self.num_copied += len(data)
        return super().__iadd__(data)

    def __bytes__(self):
        self.num_copied += len(self)
        return bytes(memoryview(self))


def test_15_unread_replies_are_bounded(server, raw):
    """The server stops reading from a peer that does not read: see also test_limits."""
    peer, other = raw(), raw()
    peer.send(p.encode(p.SET, b"/big", bytes(1 << 20)))
    peer.sync()
    requests = p.encode(p.GET, b"/big") * 500
    sending = Background(lambda: peer.send(requests))
    bound = (1 << 20) + (1 << 20) + 4096 + (256 << 10)

    def unread() -> int:
        return server._call(lambda hub: max(c.num_unread_bytes for c in hub.connections))

    until(lambda: unread() > 1 << 20, "replies lie unread")
    for _ in range(5):
        other.sync()
        assert unread() <= bound
    for _ in range(500):
        assert len(peer.take_string()) == 1 << 20
    sending.result()


def test_16_only_the_given_address_is_bound(server):
    assert server.address == "127.0.0.1"
    elsewhere = socket.socket()
    elsewhere.bind(("127.0.0.2", server.port))  # free, so the server does not hold all interfaces
    elsewhere.close()


def test_06_a_popper_that_falls_silent_loses_its_claim(closing):
    """Nobody sleeps beside an item because another was woken for it and does not come."""
    server = closing(StoreServer(limits=Limits(command_s=0.1)).start())
    first, second, pusher = (closing(Raw(server.port)) for _ in range(3))
    first.send(p.encode(p.WAIT, [b"/q"]))
    waiters_are(server, 1)
    second.send(p.encode(p.WAIT, [b"/q"]))
    waiters_are(server, 2)
    pusher.send(p.encode(p.QUEUE_PUSH, b"/q", b"only"))
    assert first.take(1) == p.WAIT_DONE
    assert second.take(1) == p.WAIT_DONE
    second.send(p.encode(p.QUEUE_POP, b"/q"))
    assert (second.take(8), second.take_string()) == (p.pack_i64(1), b"only")
    first.send(p.encode(p.QUEUE_POP, b"/q"))
    assert first.take(8) == p.pack_i64(0)
