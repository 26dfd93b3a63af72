"""Implement echelon's queries, with one function per query byte.

Each function receives the connection, the tag and the fields, and returns the payload of the
answer. If a query cannot be executed, its function raises ValueError, and the answer contains the
error message. A query with tag 0 is answered only if it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from echelon.store.server.commands import HANDLERS as TORCH_HANDLERS
from echelon.store.server.commands import demand_room_to_wait
from echelon.store.server.slices import packed, packed_keys
from echelon.store.state.state import show_key
from echelon.store.state.waiters import Waiter, Wants
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.seal import stream_keys

if TYPE_CHECKING:
    from echelon.store.server.peer import Peer

Act = Callable[..., bytes | None]

_MIN_LEASE_MS: Final = 100
_MAX_LEASE_MS: Final = 600_000


def _answering(act: Act) -> Callable[..., None]:
    """Return a handler that answers with the result of `act`, or with the error message."""

    @wraps(act)
    def handle(peer: Peer, tag: int, *fields: Any) -> None:
        try:
            payload = act(peer, tag, *fields)
        except ValueError as error:
            peer.out.put_frame(p.ERROR, tag, str(error).encode())
            return
        if payload is not None and tag:
            peer.out.put_frame(p.OK, tag, payload)

    return handle


# The handshake.


def _hello(peer: Peer, tag: int, client_nonce: bytes, version: int, session: bytes) -> bytes | None:
    del tag
    if version != p.EXTENSION_VERSION:
        raise ValueError(
            f"the client uses version {version} of echelon's protocol extension, but this server "
            f"uses {p.EXTENSION_VERSION}: use the same version of echelon for both"
        )
    if len(client_nonce) != trust.NONCE_BYTES or len(session) != trust.SESSION_BYTES:
        raise ValueError("a nonce or the session ID has the wrong length")
    if peer.session and peer.session != session:
        raise ValueError("the session ID of a connection must not change")
    secret = peer.hub.secret
    server_nonce, proof = b"", b""
    if secret and not peer.is_sealed:
        server_nonce = trust.new_nonce()
        peer.transcript = trust.transcript(client_nonce, server_nonce, session, peer.hub.instance)
        proof = trust.server_proof(secret, peer.transcript)
    peer.hub.join_session(peer, session)
    return p.pack_strings((peer.hub.instance, server_nonce, proof))


def _proof(peer: Peer, tag: int, mac: bytes) -> None:
    transcript, peer.transcript = peer.transcript, b""
    secret = peer.hub.secret
    if secret is None or peer.is_sealed:
        raise ValueError("no proof was requested")
    if not transcript or not trust.is_equal(mac, trust.client_proof(secret, transcript)):
        peer.out.put_frame(p.ERROR, tag, b"the secret is not this server's")
        peer.flush()
        peer.refuse("wrong secret")
        return
    peer.admit()
    peer.seal(*stream_keys(secret, transcript))
    peer.out.put_frame(p.OK, tag, b"")


# Keys and queues.


def _set(peer: Peer, _: int, key: bytes, value: bytes) -> bytes:
    peer.state.set(key, value)
    return b""


def _compare_set(peer: Peer, _: int, key: bytes, expected: bytes, desired: bytes) -> bytes:
    return peer.state.compare_set(key, expected, desired)


def _get_if(peer: Peer, tag: int, key: bytes) -> bytes | None:
    return _or_nothing(peer, tag, peer.state.values.get(key))


def _or_nothing(peer: Peer, tag: int, found: bytes | None) -> bytes | None:
    if found is None:
        peer.out.put_frame(p.NOTHING, tag, b"")
    return found


def _add(peer: Peer, _: int, key: bytes, amount: int) -> bytes:
    return p.pack_i64(peer.state.add(key, amount))


def _check_each(peer: Peer, _: int, keys: list[bytes]) -> bytes:
    return bytes(map(peer.state.is_present, keys))


def _num_keys(peer: Peer, _: int) -> bytes:
    return p.pack_i64(len(peer.state.values))


def _delete(peer: Peer, _: int, key: bytes) -> bytes:
    return p.pack_i64(int(peer.state.delete(key)))


def _append(peer: Peer, _: int, key: bytes, value: bytes) -> bytes:
    TORCH_HANDLERS[p.APPEND](peer, key, value)
    return b""


def _multi_set(peer: Peer, _: int, strings: list[bytes]) -> bytes:
    TORCH_HANDLERS[p.MULTI_SET](peer, strings)
    return b""


def _push(peer: Peer, _: int, key: bytes, item: bytes) -> bytes:
    peer.state.push(key, item)
    return b""


def _pop_if(peer: Peer, tag: int, key: bytes) -> bytes | None:
    count, item = peer.state.pop(key, peer)
    return _or_nothing(peer, tag, item if count else None)


def _queue_len(peer: Peer, _: int, key: bytes) -> bytes:
    return p.pack_i64(peer.state.queue_length(key))


def _list_keys(peer: Peer, tag: int) -> None:
    peer.answer_in_slices(_framed(tag, packed_keys(peer.state, peer.hub.limits.reply_bytes)))


def _framed(
    tag: int, steps: Generator[None, None, list[bytes]]
) -> Generator[None, None, list[bytes]]:
    """Return the frame for an answer that is produced in slices."""
    try:
        pieces = yield from steps
    except ValueError as error:
        return [p.frame(p.ERROR, tag, str(error).encode())]
    return [p.frame_header(p.OK, tag, sum(map(len, pieces))), *pieces] if tag else []


def _ping(_: Peer, __: int) -> bytes:
    return b""


# Waits. Each belongs to its tag, by which it is cancelled.


def _demand_tag(peer: Peer, tag: int) -> None:
    if not tag or peer.waiter_of(tag) is not None or tag in peer.watches:
        raise ValueError(f"tag {tag} cannot be used for a wait: the tag is 0 or already in use")
    demand_room_to_wait(peer)


def _wait(peer: Peer, tag: int, wants: Wants, keys: list[bytes]) -> bool:
    """Return whether all keys exist; start a wait if any are missing."""
    if tag and all(key in peer.state.values for key in keys):
        return True
    _demand_tag(peer, tag)
    waiter = peer.state.wait(peer, wants, keys)
    if waiter is not None:
        waiter.tag = tag
    return waiter is None


def _await(peer: Peer, tag: int, keys: list[bytes]) -> bytes | None:
    return b"" if _wait(peer, tag, Wants.WAKE, keys) else None


def _await_get(peer: Peer, tag: int, key: bytes) -> bytes | None:
    return peer.state.values[key] if _wait(peer, tag, Wants.VALUE, [key]) else None


def _await_multi_get(peer: Peer, tag: int, keys: list[bytes]) -> None:
    if _wait(peer, tag, Wants.VALUES, keys):
        values = [peer.state.values[key] for key in keys]
        steps = packed("multi_get", values, peer.hub.limits.reply_bytes)
        peer.answer_in_slices(_framed(tag, steps))


def _await_pop(peer: Peer, tag: int, key: bytes) -> bytes | None:
    _demand_tag(peer, tag)
    result = peer.state.wait_item(peer, key)
    if isinstance(result, bytes):
        return result
    result.tag = tag
    return None


def _gather(peer: Peer, tag: int, key: bytes, rank: int, world_size: int, value: bytes) -> None:
    _arrive_as(peer, tag, Wants.GATHER, key, rank, world_size, value)


def _arrive(peer: Peer, tag: int, key: bytes, rank: int, world_size: int) -> None:
    _arrive_as(peer, tag, Wants.BARRIER, key, rank, world_size, b"")


def _arrive_as(
    peer: Peer, tag: int, wants: Wants, key: bytes, rank: int, world_size: int, value: bytes
) -> None:
    _demand_tag(peer, tag)
    peer.state.arrive(peer, wants, key, rank, world_size, value).tag = tag


def _cancel(peer: Peer, tag: int) -> None:
    """Withdraw a wait or a watch that has not been answered yet."""
    waiter: Waiter | None = peer.waiter_of(tag)
    if waiter is not None:
        world_size, arrived, missing = peer.state.story_of(waiter)
        peer.state.withdraw(waiter)
        peer.out.put_frame(p.CANCELLED, tag, p.pack_integers((world_size, arrived, *missing)))
    elif tag in peer.watches:
        peer.hub.unwatch(peer, tag)
        peer.out.put_frame(p.CANCELLED, tag, b"")


def _watch(peer: Peer, tag: int, keys: list[bytes]) -> bytes:
    _demand_tag(peer, tag)
    peer.hub.watch(peer, tag, keys)
    return b""


# Leases.


def _presence(peer: Peer, _: int, key: bytes, value: bytes, lease_ms: int) -> bytes:
    if not peer.session:
        raise ValueError("a presence requires a session: send HELLO first")
    if not _MIN_LEASE_MS <= lease_ms <= _MAX_LEASE_MS:
        raise ValueError(
            f"the lease for key {show_key(key)} must be from {_MIN_LEASE_MS} to "
            f"{_MAX_LEASE_MS} ms, got {lease_ms}"
        )
    if peer.hub.leases.num_of(peer.session) >= peer.hub.limits.num_presences:
        raise ValueError(
            f"the session cannot have more than {peer.hub.limits.num_presences} presences"
        )
    peer.hub.leases.take(peer.session, key, value, lease_ms / 1000)
    return b""


def _beat(peer: Peer, _: int) -> bytes:
    return p.pack_i64(peer.hub.leases.renew(peer.session))


def _release(peer: Peer, _: int, key: bytes) -> bytes:
    peer.hub.leases.release(peer.session, key)
    return b""


def _statistics(peer: Peer, tag: int) -> None:
    peer.answer_in_slices(_framed_statistics(peer, tag))


def _framed_statistics(peer: Peer, tag: int) -> Generator[None, None, list[bytes]]:
    statistics = yield from peer.hub.statistics()
    return [p.frame(p.OK, tag, statistics.to_json())] if tag else []


_ACTS: Final[dict[int, Act]] = {
    p.ACK_SET: _set,
    p.ACK_COMPARE_SET: _compare_set,
    p.GET_IF: _get_if,
    p.ACK_ADD: _add,
    p.CHECK_EACH: _check_each,
    p.AWAIT: _await,
    p.ACK_NUM_KEYS: _num_keys,
    p.ACK_DELETE: _delete,
    p.ACK_APPEND: _append,
    p.AWAIT_MULTI_GET: _await_multi_get,
    p.ACK_MULTI_SET: _multi_set,
    p.CANCEL: _cancel,
    p.ACK_PING: _ping,
    p.ACK_PUSH: _push,
    p.POP_IF: _pop_if,
    p.ACK_QUEUE_LEN: _queue_len,
    p.ACK_LIST_KEYS: _list_keys,
    p.HELLO: _hello,
    p.PROOF: _proof,
    p.GATHER: _gather,
    p.ARRIVE: _arrive,
    p.AWAIT_GET: _await_get,
    p.AWAIT_POP: _await_pop,
    p.WATCH: _watch,
    p.PRESENCE: _presence,
    p.STATISTICS: _statistics,
    p.BEAT: _beat,
    p.RELEASE: _release,
}

# The function of each query byte, torch's and echelon's.
HANDLERS: Final[dict[int, Callable[..., None]]] = {
    **TORCH_HANDLERS,
    **{query: _answering(act) for query, act in _ACTS.items()},
}
