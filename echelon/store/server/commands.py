"""Implement torch's commands, with one function per query byte.

Each function receives the connection and the fields of the command. torch's protocol does not have
error replies. If a command cannot be executed, its function raises ValueError, and the connection
is closed. The module `queries` implements echelon's own queries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final

from echelon.store.server.slices import packed, packed_keys
from echelon.store.state.state import show_key
from echelon.store.state.waiters import Wants
from echelon.store.wire import protocol as p

if TYPE_CHECKING:
    from echelon.store.server.peer import Peer


# torch's commands.


def _on_ping(peer: Peer, nonce: int) -> None:
    peer.out.put(p.pack_u32(p.OUR_ANSWER if nonce == p.OUR_NONCE else nonce))


def _on_set(peer: Peer, key: bytes, value: bytes) -> None:
    peer.state.set(key, value)


def _on_get(peer: Peer, key: bytes) -> None:
    peer.out.put_value(peer.state.values.get(key, b""))


def _on_compare_set(peer: Peer, key: bytes, expected: bytes, desired: bytes) -> None:
    peer.out.put_value(peer.state.compare_set(key, expected, desired))


def _on_add(peer: Peer, key: bytes, amount: int) -> None:
    peer.out.put(p.pack_i64(peer.state.add(key, amount)))


def _on_check(peer: Peer, keys: list[bytes]) -> None:
    is_present = all(map(peer.state.is_present, keys))
    peer.out.put(p.CHECK_PRESENT if is_present else p.CHECK_MISSING)


def _on_wait(peer: Peer, keys: list[bytes]) -> None:
    if all(key in peer.state.values for key in keys):
        peer.out.put(p.WAIT_DONE)
        return
    demand_room_to_wait(peer)
    wants = Wants.WAKE if peer.is_ours else Wants.CLAIM
    if peer.state.wait(peer, wants, keys) is None:
        peer.out.put(p.WAIT_DONE)


def _on_num_keys(peer: Peer) -> None:
    peer.out.put(p.pack_i64(len(peer.state.values)))


def _on_delete(peer: Peer, key: bytes) -> None:
    peer.out.put(p.pack_i64(int(peer.state.delete(key))))


def _on_append(peer: Peer, key: bytes, value: bytes) -> None:
    size = len(peer.state.values.get(key, b"")) + len(value)
    if size > peer.hub.limits.value_bytes:
        raise ValueError(
            f"append: the value of key {show_key(key)} would be {size} bytes long, but the limit "
            f"is {peer.hub.limits.value_bytes}"
        )
    peer.state.append(key, value)


def _on_multi_get(peer: Peer, keys: list[bytes]) -> None:
    get = peer.state.values.get
    values = [get(key, b"") for key in keys]
    peer.answer_in_slices(packed("multi_get", values, peer.hub.limits.reply_bytes))


def _on_multi_set(peer: Peer, strings: list[bytes]) -> None:
    peer.state.set_many(zip(strings[::2], strings[1::2], strict=True))


def _on_cancel_wait(peer: Peer) -> None:
    for waiter in peer.state.waiters_of(peer):
        peer.state.withdraw(waiter)
    peer.hub.deliver_woken_to(peer)  # its byte must not come after the one that says "cancelled"
    peer.out.put(p.WAIT_CANCELLED)


def _on_queue_push(peer: Peer, key: bytes, item: bytes) -> None:
    peer.state.push(key, item)


def _on_queue_pop(peer: Peer, key: bytes) -> None:
    count, item = peer.state.pop(key, peer)
    peer.out.put(p.pack_i64(count))
    if count:
        peer.out.put_value(item)


def _on_queue_len(peer: Peer, key: bytes) -> None:
    peer.out.put(p.pack_i64(peer.state.queue_length(key)))


def _on_list_keys(peer: Peer) -> None:
    peer.answer_in_slices(_list_keys(peer))


def _list_keys(peer: Peer) -> Generator[None, None, list[bytes]]:
    count = len(peer.state.values)
    pieces = yield from packed_keys(peer.state, peer.hub.limits.reply_bytes)
    return [p.pack_i64(count), *pieces]


def _on_barrier(peer: Peer, key: bytes, world_size: int) -> None:
    demand_room_to_wait(peer)
    peer.state.arrive(peer, Wants.BARRIER, key, -1, world_size)


def demand_room_to_wait(peer: Peer) -> None:
    """Raise ValueError if the connection has reached its limit on open waits."""
    if peer.state.num_waits_of(peer) >= peer.hub.limits.num_waiters:
        raise ValueError(
            f"the connection cannot have more than {peer.hub.limits.num_waiters} open waits"
        )


# The function of each query of torch's; VALIDATE is the parser's.
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
}
