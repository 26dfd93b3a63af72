"""The stream after the handshake: what a relay, an injector and a replay can do to it."""

from __future__ import annotations

import socket

import pytest

from echelon.errors import StoreConnectionError, StoreProtocolError
from echelon.store import StoreServer, TCPStore
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.seal import HEADER_BYTES, RECORD_BYTES, Opener, Sealer, stream_keys
from tests.store.peers import Background, ours, until
from tests.store.relay import Relay
from tests.store.test_trust import HELLO_BYTES, hello

SECRET = "correct horse battery staple"
KEY = bytes(32)


@pytest.fixture
def guarded():
    with StoreServer(secret=SECRET) as server:
        yield server


@pytest.fixture
def relay(guarded, closing):
    return closing(Relay(guarded.port))


def test_whatever_was_sealed_is_opened_however_it_is_split():
    data = bytes(range(256)) * 600
    sealer = Sealer(KEY)
    stream = sealer.seal(data) + sealer.seal(b"") + sealer.seal(b"end")
    for step in (1, 7, HEADER_BYTES, 65536, len(stream)):
        opener = Opener(KEY)
        pieces = [opener.open(stream[at : at + step]) for at in range(0, len(stream), step)]
        assert b"".join(pieces) == data + b"end"
        assert not opener.is_inside_record


@pytest.mark.parametrize("at", [0, 1, 4, 19, 20, 24])
def test_a_changed_byte_is_noticed(at):
    record = bytearray(Sealer(KEY).seal(b"hello"))
    record[at] ^= 1
    opener = Opener(KEY)
    if at == 0:  # one byte less is demanded: the rest begins another record
        record = record[:-1]
    if at == 1:  # 256 more are waited for; the next records are taken for them
        record += bytes(300)
    with pytest.raises(StoreProtocolError, match="changed in transit"):
        opener.open(bytes(record))


def test_records_count_once_in_order_and_in_their_direction():
    first, second = (sealer := Sealer(KEY)).seal(b"1"), sealer.seal(b"2")
    for stream in (second, first + first, second + first):
        with pytest.raises(StoreProtocolError, match="changed in transit"):
            Opener(KEY).open(stream)
    to_server, to_client = stream_keys(b"secret", b"nonces")
    with pytest.raises(StoreProtocolError, match="changed in transit"):
        Opener(to_client).open(Sealer(to_server).seal(b"1"))


def test_what_is_held_unproved_is_bounded():
    with pytest.raises(StoreProtocolError, match="the limit is 65536"):
        Opener(KEY).open((RECORD_BYTES + 1).to_bytes(4, "little") + bytes(16))


def test_a_relay_forwards_and_can_do_no_more(guarded, relay, closing):
    """A false server that passed the proofs on holds a connection that it cannot use."""
    victim = closing(TCPStore("127.0.0.1", relay.port, timeout=20.0, secret=SECRET))
    victim.set_confirmed("k", bytes(200_000))
    assert victim.get("k") == bytes(200_000)
    command = p.encode(p.SET, b"/pwned", b"by the relay")
    relay.inject(Sealer(KEY).seal(command))
    until(lambda: guarded.statistics().num_refused == 1, "the injected command is refused")
    assert guarded.statistics().num_keys == 1


def test_what_a_relay_puts_into_an_answer_is_not_believed(relay, closing):
    victim = closing(TCPStore("127.0.0.1", relay.port, timeout=20.0, secret=SECRET))
    victim.set_confirmed("k", b"true")
    relay.inject_back(Sealer(KEY).seal(p.frame(p.OK, 1, b"false")))
    with pytest.raises(StoreConnectionError, match="changed in transit"):
        victim.add("n", 1)


@pytest.mark.parametrize(
    "rest",
    [p.encode(p.SET, b"/k", b"v"), b"\x01", p.encode(p.PING, 1)],
    ids=["SET", "part", "PING"],
)
def test_what_follows_the_proof_unsealed_is_refused(guarded, closing, rest):
    peer = closing(ours(guarded.port))
    transcript = hello(peer)
    peer.send(p.tagged(p.PROOF, 1, trust.client_proof(SECRET.encode(), transcript)) + rest)
    assert peer.is_closed_by_server()
    assert guarded.statistics().num_keys == 0
    assert guarded.statistics().num_refused == 1


def test_a_client_takes_nothing_unsealed_after_the_servers_proof(closing):
    """Who cannot prove the secret appends bytes to the true server's welcome."""
    listener = closing(socket.create_server(("127.0.0.1", 0)))

    def pretend():
        connected, _ = listener.accept()
        with connected:
            connected.recv(10, socket.MSG_WAITALL)
            connected.sendall(p.pack_u32(p.OUR_ANSWER))
            greeting = connected.recv(HELLO_BYTES, socket.MSG_WAITALL)
            client_nonce, session = greeting[13:45], greeting[-16:]
            server_nonce, instance = trust.new_nonce(), bytes(16)
            transcript = trust.transcript(client_nonce, server_nonce, session, instance)
            proof = trust.server_proof(SECRET.encode(), transcript)
            welcome = p.frame(p.OK, 1, p.pack_strings((instance, server_nonce, proof)))
            connected.sendall(welcome + p.frame(p.OK, 1))
            while connected.recv(1 << 16):
                pass

    false = Background(pretend)
    with pytest.raises(StoreConnectionError, match="unsealed bytes"):
        TCPStore("127.0.0.1", listener.getsockname()[1], timeout=20.0, secret=SECRET)
    false.result()
