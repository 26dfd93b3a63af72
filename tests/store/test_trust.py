"""Who is let in: the secret, torch's clients, addresses, and what a false peer can do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import StoreConnectionError, StoreError, StoreTimeoutError
from echelon.host import tcp_table
from echelon.store import StoreServer, TCPStore
from echelon.store.server import hub
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.seal import HEADER_BYTES, Opener, stream_keys
from tests.store.peers import OPENING, SYNC, SYNCED, Background, Raw, ours, until

SECRET = "correct horse battery staple"


HELLO_BYTES = 1 + 4 + 8 + 32 + 8 + 8 + 16
WRONG = "wrong horse battery staple"


@pytest.fixture
def guarded():
    with StoreServer(secret=SECRET) as server:
        yield server


def test_who_knows_the_secret_is_let_in(guarded, closing):
    first = closing(TCPStore("127.0.0.1", guarded.port, timeout=20.0, secret=SECRET))
    second = closing(TCPStore("127.0.0.1", guarded.port, timeout=20.0, secret=SECRET.encode()))
    first.set("k", b"v")
    assert second.get("k") == b"v"
    assert closing(second.clone()).get("k") == b"v"


def test_who_does_not_is_told_so(guarded, server, closing):
    for secret, why in ((WRONG, "does not know this client's"), (None, "requires a secret")):
        with pytest.raises(StoreConnectionError, match=why):
            TCPStore("127.0.0.1", guarded.port, timeout=20.0, secret=secret)
    with pytest.raises(StoreConnectionError, match="does not know this client's secret"):
        TCPStore("127.0.0.1", server.port, timeout=20.0, secret=SECRET)
    until(lambda: guarded.statistics().num_connections == 0, "the refused have left")


def test_a_server_is_not_believed_without_its_proof(closing):
    """A false server answers our PING and HELLO but cannot prove the secret."""
    listener = closing(socket.create_server(("127.0.0.1", 0)))

    def pretend():
        connected, _ = listener.accept()
        with connected:
            connected.recv(10, socket.MSG_WAITALL)
            connected.sendall(p.pack_u32(p.OUR_ANSWER))
            connected.recv(HELLO_BYTES, socket.MSG_WAITALL)
            parts = (bytes(16), trust.new_nonce(), bytes(32))
            connected.sendall(p.frame(p.OK, 1, p.pack_strings(parts)))
            assert connected.recv(1) == b"", "the client went on"

    false = Background(pretend)
    with pytest.raises(StoreConnectionError, match="does not know this client's secret"):
        TCPStore("127.0.0.1", listener.getsockname()[1], timeout=20.0, secret=SECRET)
    false.result()


def hello(peer: Raw) -> bytes:
    """Send a HELLO; return what the proofs cover."""
    nonce = trust.new_nonce()
    session = trust.new_session()
    peer.send(p.tagged(p.HELLO, 1, nonce, p.EXTENSION_VERSION, session))
    status, payload = peer.take_frame()
    assert status == p.OK
    instance, server_nonce, proof = p.unpack_strings(payload)
    transcript = trust.transcript(nonce, server_nonce, session, instance)
    assert proof == trust.server_proof(SECRET.encode(), transcript)
    return transcript


def test_a_recorded_proof_is_worth_nothing(guarded, closing):
    first = closing(ours(guarded.port))
    transcript = hello(first)
    proof = p.tagged(p.PROOF, 1, trust.client_proof(SECRET.encode(), transcript))
    first.send(proof)
    sealed = first.take(HEADER_BYTES + p.FRAME_HEADER_BYTES)
    opened = Opener(stream_keys(SECRET.encode(), transcript)[1]).open(sealed)
    assert opened == p.frame(p.OK, 1)
    second = closing(ours(guarded.port))
    hello(second)
    second.send(proof)
    assert second.take_frame()[0] == p.ERROR
    assert second.is_closed_by_server()


@pytest.mark.parametrize(
    "command",
    [
        p.encode(p.SET, b"/k", b"stolen"),
        p.tagged(p.AWAIT_GET, 1, b"/k"),
        p.tagged(p.STATISTICS, 1),
        p.tagged(p.PROOF, 1, bytes(32)),
    ],
    ids=["SET", "AWAIT_GET", "STATISTICS", "PROOF"],
)
def test_nothing_is_carried_out_before_the_proof(guarded, closing, command, caplog):
    peer = closing(ours(guarded.port))
    peer.send(command)
    assert peer.is_closed_by_server()
    assert guarded.statistics().num_keys == 0
    assert caplog.records


def test_the_secret_is_nowhere_in_the_log(guarded, caplog):
    for secret in (WRONG, None):
        with pytest.raises(StoreConnectionError) as failure:
            TCPStore("127.0.0.1", guarded.port, timeout=20.0, secret=secret)
        assert SECRET not in str(failure.value)
        assert "wrong" not in str(failure.value)
    assert SECRET not in caplog.text


def test_a_torch_client_of_our_own_user_is_let_in_on_loopback(guarded, closing):
    peers = [closing(Raw(guarded.port, opening=OPENING + SYNC)) for _ in range(20)]
    for peer in peers:
        assert peer.take(4) == SYNCED
    peers[0].send(p.encode(p.SET, b"/k", bytes(10_000)), p.encode(p.GET, b"/k"))
    assert peers[0].take_string() == bytes(10_000)


def test_a_torch_client_of_another_user_is_not(guarded, closing, monkeypatch, caplog):
    monkeypatch.setattr(trust.os, "getuid", lambda: 12345)
    peer = closing(Raw(guarded.port, opening=OPENING + SYNC))
    assert peer.is_closed_by_server()
    assert "from an address that is not admitted" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_the_kernel_tells_another_users_connection(guarded):
    script = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "peer = socket.socket()\n"
        f"peer.connect(('127.0.0.1', {guarded.port}))\n"
        f"peer.sendall({OPENING + SYNC!r})\n"
        "sys.exit(0 if peer.recv(4) == b'' else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def _as_another_user(script: str) -> int:
    """Run a script as uid 65534; return its exit code."""
    prelude = "import os, socket, sys\nos.setuid(65534)\n"
    argv = [sys.executable, "-c", prelude + script]
    return subprocess.run(argv, timeout=60, check=False).returncode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_another_user_who_has_closed_is_not_taken_for_us(guarded, closing, monkeypatch):
    """A closed end's line in the kernel's table says uid 0, which is ours where we are root."""
    looks = []
    real = tcp_table.owner_uids

    def late(connections):
        asked = list(connections)
        gone = [f"{ends[1]:04X} " for ends in asked]
        until(
            lambda: all(_state_of(port) in ("05", "06") for port in gone),
            "the stranger has closed",
        )
        looks.append(asked)
        return real(asked)

    monkeypatch.setattr(hub, "owner_uids", late)
    command = OPENING + SYNC + p.encode(p.SET, b"/pwned", b"by uid 65534")
    script = (
        "peer = socket.socket()\n"
        f"peer.connect(('127.0.0.1', {guarded.port}))\n"
        f"peer.sendall({command!r})\n"
        "peer.close()\n"
    )
    assert _as_another_user(script) == 0
    until(lambda: guarded.statistics().num_refused == 1, "the stranger is refused")
    assert len(looks) == 1
    assert guarded.statistics().num_keys == 0


def _state_of(port: str) -> str:
    """Return the TCP state of the local end at ":PORT ", "" if there is none."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        if line.split(":", 1)[1].lstrip()[9:].startswith(port):
            return line.split()[3]
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_two_users_with_equal_ports_are_told_apart(closing):
    listener = closing(socket.create_server(("0.0.0.0", 0)))
    port = listener.getsockname()[1]
    mine = closing(socket.socket())
    mine.bind(("127.0.0.1", 0))
    mine.connect(("127.0.0.1", port))
    script = (
        "peer = socket.socket()\n"
        f"peer.bind(('127.0.0.9', {mine.getsockname()[1]}))\n"
        f"peer.connect(('127.0.0.1', {port}))\n"
        "peer.recv(1)\n"
    )
    other = Background(lambda: _as_another_user(script))
    accepted = [closing(listener.accept()[0]) for _ in range(2)]
    seen = [(*far.getpeername(), *far.getsockname()) for far in accepted]
    owners = {ends[0]: uid for ends, uid in tcp_table.owner_uids(seen).items()}
    for far in accepted:
        far.shutdown(socket.SHUT_WR)
    assert owners == {"127.0.0.1": 0, "127.0.0.9": 65534}
    assert other.result() == 0


def test_no_uid_is_believed_where_the_kernel_cannot_name_users(monkeypatch):
    monkeypatch.setattr(trust.os, "getuid", lambda: 65534)
    maps = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": "0 1000 1\n"}
    monkeypatch.setattr(trust.Path, "read_text", lambda self, **_: maps[str(self)])
    assert trust.own_uid() is None
    maps["/proc/self/uid_map"] = "         0          0 4294967295\n"
    assert trust.own_uid() == 65534


def test_a_torch_client_from_elsewhere_needs_its_address_admitted(guarded, closing, monkeypatch):
    monkeypatch.setattr(trust, "is_loopback", lambda _: False)
    stranger = closing(Raw(guarded.port, opening=OPENING + SYNC, source="127.0.0.2"))
    assert stranger.is_closed_by_server()
    guarded.admit("::ffff:127.0.0.2")
    admitted = closing(Raw(guarded.port, opening=OPENING + SYNC, source="127.0.0.2"))
    assert admitted.take(4) == SYNCED


def test_a_torch_client_of_our_own_user_is_let_in_on_the_hosts_own_address(
    guarded, closing, monkeypatch
):
    """A job that several nodes dial is reached from its own host by that address, not loopback."""
    monkeypatch.setattr(trust, "is_loopback", lambda _: False)
    assert closing(Raw(guarded.port, opening=OPENING + SYNC)).take(4) == SYNCED


def test_addresses_have_one_spelling():
    assert tcp_table.plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert tcp_table.plain_address("fe80::1%eth0") == "fe80::1"
    assert trust.is_loopback("::1")
    assert trust.is_loopback("127.8.9.10")
    assert not trust.is_loopback("10.0.0.1")


def test_the_kernel_knows_whose_connection_it_is(closing):
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            listener = closing(socket.create_server((host, 0), family=family))
        except OSError:
            continue
        near = closing(socket.create_connection(listener.getsockname()[:2]))
        far, _ = listener.accept()
        closing(far)
        seen = (*far.getpeername()[:2], *far.getsockname()[:2])
        assert tcp_table.owner_uids([seen]) == {seen: os.getuid()}
        near.close()
        assert not tcp_table.owner_uids([seen])


def test_empty_and_short_secrets_are_refused():
    with pytest.raises(ValueError, match="secret is empty"):
        StoreServer(secret="")
    with pytest.raises(ValueError, match="the secret has 15 bytes, but at least 16"):
        StoreServer(secret="x" * 15)
    with pytest.raises(ValueError, match="the secret has 6 bytes"):
        TCPStore("127.0.0.1", 1, secret="s3cret", timeout=1.0)


def test_only_what_was_asked_for_is_bound():
    with pytest.raises(ValueError, match="host must not be empty"):
        StoreServer("")
    with pytest.raises(StoreError, match=r"cannot bind 192\.0\.2\.1"):
        StoreServer("192.0.2.1")
    with StoreServer("192.0.2.1", secret=SECRET, bind_all_if_foreign=True) as server:
        assert server.address == "0.0.0.0"
    with pytest.raises(StoreError, match="cannot resolve"):
        StoreServer("no.such.host.invalid")


def test_ipv6_and_names_are_served_and_dialled(closing):
    try:
        server = closing(StoreServer("::1").start())
    except StoreError as error:
        pytest.skip(f"no IPv6 here: {error}")
    store = closing(TCPStore("::1", server.port, timeout=20.0))
    assert store.add("n", 1) == 1
    named = closing(StoreServer("localhost").start())
    assert closing(TCPStore("localhost", named.port, timeout=20.0)).add("n", 1) == 1


def test_no_server_is_a_timeout_that_says_where(closing):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(StoreTimeoutError, match=rf"connect on 127\.0\.0\.1:{port}: no server"):
        TCPStore("127.0.0.1", port, timeout=0.2)
