"""What each command of a peer does: one small function for each query byte.

A function gets the connection and the fields of the message; it acts on the shared state and
answers through the connection. torch's commands have no error reply, so what cannot be done raises
ValueError, and the connection is closed with that text in the log; our queries answer with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from echelon.store import protocol as p
from echelon.store import trust
from echelon.store.seal import stream_keys
from echelon.store.state import show_key
from echelon.store.waiters import Wants

if TYPE_CHECKING:
    from echelon.store.connection import Connection


def _on_hello(peer: Connection, client_nonce: bytes, version: int) -> None:
    if version != p.EXTENSION_VERSION or len(client_nonce) != trust.NONCE_BYTES:
        peer.reply_error(f"extension version {version}, this server has {p.EXTENSION_VERSION}")
        return
    secret = peer.hub.secret
    server_nonce = trust.new_nonce() if secret else b""
    proof = b""
    if secret:
        peer.transcript = trust.transcript(client_nonce, server_nonce, peer.hub.instance)
        proof = trust.server_proof(secret, peer.transcript)
    peer.reply(p.frame(p.OK, p.pack_strings((peer.hub.instance, server_nonce, proof))))


def _on_proof(peer: Connection, mac: bytes) -> None:
    transcript, peer.transcript = peer.transcript, b""
    secret = peer.hub.secret
    if secret is None or peer.is_sealed:
        peer.reply_error("no proof is asked for")
        return
    if not transcript or not trust.is_equal(mac, trust.client_proof(secret, transcript)):
        peer.reply_error("the secret is not this server's")
        peer.flush()
        peer.refuse("wrong secret")
        return
    peer.admit()
    peer.seal(*stream_keys(secret, transcript))
    peer.reply(p.frame(p.OK))


# torch's commands.


def _on_ping(peer: Connection, nonce: int) -> None:
    peer.reply(p.pack_u32(p.OUR_ANSWER if nonce == p.OUR_NONCE else nonce))


def _on_set(peer: Connection, key: bytes, value: bytes) -> None:
    peer.state.set(key, value)


def _on_get(peer: Connection, key: bytes) -> None:
    peer.reply_value(peer.state.values.get(key, b""))


def _on_compare_set(peer: Connection, key: bytes, expected: bytes, desired: bytes) -> None:
    peer.reply_value(peer.state.compare_set(key, expected, desired))


def _on_add(peer: Connection, key: bytes, amount: int) -> None:
    peer.reply(p.pack_i64(peer.state.add(key, amount)))


def _on_check(peer: Connection, keys: list[bytes]) -> None:
    is_present = all(map(peer.state.is_present, keys))
    peer.reply(p.CHECK_PRESENT if is_present else p.CHECK_MISSING)


def _on_wait(peer: Connection, keys: list[bytes]) -> None:
    _demand_room_to_wait(peer)
    wants = Wants.WAKE if peer.is_ours else Wants.CLAIM
    if peer.state.wait(peer, wants, keys) is None:
        peer.reply(p.WAIT_DONE)


def _on_num_keys(peer: Connection) -> None:
    peer.reply(p.pack_i64(len(peer.state.values)))


def _on_delete(peer: Connection, key: bytes) -> None:
    peer.reply(p.pack_i64(int(peer.state.delete(key))))


def _on_append(peer: Connection, key: bytes, value: bytes) -> None:
    size = len(peer.state.values.get(key, b"")) + len(value)
    if size > peer.hub.limits.value_bytes:
        raise ValueError(f"append: {show_key(key)} would hold {size} bytes")
    peer.state.append(key, value)


def _on_multi_get(peer: Connection, keys: list[bytes]) -> None:
    values = [peer.state.values.get(key, b"") for key in keys]
    if sum(map(len, values)) > peer.hub.limits.reply_bytes:
        raise ValueError(f"multi_get of more than {peer.hub.limits.reply_bytes} bytes")
    for value in values:
        peer.reply_value(value)


def _on_multi_set(peer: Connection, strings: list[bytes]) -> None:
    peer.state.set_many(zip(strings[::2], strings[1::2], strict=True))


def _on_cancel_wait(peer: Connection) -> None:
    for waiter in peer.state.waiters_of(peer):
        peer.state.withdraw(waiter)
    peer.reply(p.WAIT_CANCELLED)


def _on_queue_push(peer: Connection, key: bytes, item: bytes) -> None:
    peer.state.push(key, item)


def _on_queue_pop(peer: Connection, key: bytes) -> None:
    count, item = peer.state.pop(key, peer)
    peer.reply(p.pack_i64(count))
    if count:
        peer.reply_value(item)


def _on_queue_len(peer: Connection, key: bytes) -> None:
    peer.reply(p.pack_i64(peer.state.queue_length(key)))


def _on_list_keys(peer: Connection) -> None:
    keys = peer.state.values
    peer.reply(p.pack_i64(len(keys)) + p.pack_strings(keys))


def _on_barrier(peer: Connection, key: bytes, world_size: int) -> None:
    _demand_room_to_wait(peer)
    peer.state.arrive(peer, Wants.BARRIER, key, -1, world_size)


# Our extensions.


def _demand_room_to_wait(peer: Connection) -> None:
    if peer.state.num_waits_of(peer) >= peer.hub.limits.num_waiters:
        raise ValueError(f"more than {peer.hub.limits.num_waiters} open waits")


def _on_cancel(peer: Connection) -> None:
    waiters = peer.state.waiters_of(peer)
    if not waiters:
        peer.reply(p.frame(p.NOTHING))
        return
    for waiter in waiters:
        world_size, came, missing = peer.state.story_of(waiter)
        peer.state.withdraw(waiter)
        peer.reply(p.frame(p.CANCELLED, p.pack_integers((world_size, came, *missing))))


def _on_gather(peer: Connection, key: bytes, rank: int, world_size: int, value: bytes) -> None:
    _arrive(peer, Wants.GATHER, key, rank, world_size, value)


def _on_arrive(peer: Connection, key: bytes, rank: int, world_size: int) -> None:
    _arrive(peer, Wants.BARRIER, key, rank, world_size, b"")


def _arrive(
    peer: Connection, wants: Wants, key: bytes, rank: int, world_size: int, value: bytes
) -> None:
    _demand_room_to_wait(peer)
    try:
        waiter = peer.state.arrive(peer, wants, key, rank, world_size, value)
    except ValueError as error:
        peer.reply_error(str(error))
        return
    waiter.is_framed = True


def _on_ack_set(peer: Connection, key: bytes, value: bytes) -> None:
    _acknowledge(peer, lambda: peer.state.set(key, value))


def _on_ack_add(peer: Connection, key: bytes, amount: int) -> None:
    _acknowledge(peer, lambda: p.pack_i64(peer.state.add(key, amount)))


def _acknowledge(peer: Connection, act: Callable[[], bytes | None]) -> None:
    """Answer with what `act` returns, or with why it cannot."""
    try:
        peer.reply(p.frame(p.OK, act() or b""))
    except ValueError as error:
        peer.reply_error(str(error))


def _on_await_get(peer: Connection, key: bytes) -> None:
    _demand_room_to_wait(peer)
    waiter = peer.state.wait(peer, Wants.VALUE, [key])
    if waiter is None:
        peer.reply(p.frame(p.OK, peer.state.values[key]))
    else:
        waiter.is_framed = True


def _on_await_pop(peer: Connection, key: bytes) -> None:
    _demand_room_to_wait(peer)
    result = peer.state.wait_item(peer, key)
    if isinstance(result, bytes):
        peer.reply(p.frame(p.OK, result))
    else:
        result.is_framed = True


def _on_watch(peer: Connection, keys: list[bytes]) -> None:
    peer.hub.watch(peer, keys)
    peer.reply(p.frame(p.OK))


def _on_presence(peer: Connection, key: bytes, value: bytes) -> None:
    _acknowledge(peer, lambda: peer.state.set_presence(peer, key, value))


def _on_statistics(peer: Connection) -> None:
    peer.reply(p.frame(p.OK, peer.hub.statistics().to_json()))


# The function of each query; VALIDATE is the parser's.
HANDLERS: Final[dict[int, Callable[..., None]]] = {
    p.SET: _on_set,
    p.GET: _on_get,
    p.COMPARE_SET: _on_compare_set,
    p.ADD: _on_add,
    p.CHECK: _on_check,
    p.WAIT: _on_wait,
    p.NUM_KEYS: _on_num_keys,
    p.DELETE_KEY: _on_delete,
    p.APPEND: _on_append,
    p.MULTI_GET: _on_multi_get,
    p.MULTI_SET: _on_multi_set,
    p.CANCEL_WAIT: _on_cancel_wait,
    p.PING: _on_ping,
    p.QUEUE_PUSH: _on_queue_push,
    p.QUEUE_POP: _on_queue_pop,
    p.QUEUE_LEN: _on_queue_len,
    p.LIST_KEYS: _on_list_keys,
    p.BARRIER: _on_barrier,
    p.HELLO: _on_hello,
    p.PROOF: _on_proof,
    p.CANCEL: _on_cancel,
    p.GATHER: _on_gather,
    p.ARRIVE: _on_arrive,
    p.ACK_SET: _on_ack_set,
    p.ACK_ADD: _on_ack_add,
    p.AWAIT_GET: _on_await_get,
    p.AWAIT_POP: _on_await_pop,
    p.WATCH: _on_watch,
    p.PRESENCE: _on_presence,
    p.STATISTICS: _on_statistics,
}
