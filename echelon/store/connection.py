"""One connection of the server: messages in, replies out, on the event loop.

The connection owns its parser, its unsent replies and, while its peer reads too slowly, the
messages that were read but not yet carried out. What it waits for lives in the shared
`StoreState` under the connection as owner, so that closing it takes everything back.

Replies of one received packet leave in one write. When more than `Limits.unread_bytes` lie
unread, the connection stops carrying out commands and stops reading until the peer has caught up:
a slow reader costs the server at most that plus one reply and one packet of commands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from echelon.store import protocol as p
from echelon.store import trust
from echelon.store.state import Waiter, Wants, show_key

if TYPE_CHECKING:
    from echelon.store.hub import Hub

_FLUSH_BYTES = 256 << 10  # replies gathered before they are handed to the transport
_PACKET_COMMANDS = 131072  # more than one packet can hold
_LINGER_S = 2.0  # how long a closed connection's last replies may take
_JOIN_BYTES = 4096  # values from here on are passed on by reference, not copied


class Standing(Enum):
    """How far a peer has come."""

    NEW = "new"  # must say VALIDATE, then PING
    CHALLENGED = "challenged"  # ours; owes a proof of the secret
    LOOKED_UP = "looked up"  # torch's; the kernel is asked whose process it is
    MEMBER = "member"
    CLOSED = "closed"


class Connection(asyncio.Protocol):
    """Serve one peer. All methods run on the server's loop.

    Attributes:
        peer: "address:port" of the peer.
        standing: how far it has come.
        since: loop time of the accept, or of the first byte of an incomplete command.
        is_inside_command: whether the peer has begun a command and not completed it.
        partial_bytes: what came of the incomplete command.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.state = hub.state
        self.peer = "?"
        self.standing = Standing.NEW
        self.since = hub.loop.time()
        self.partial_bytes = 0
        self.is_inside_command = True
        self.watched_keys: set[bytes] = set()
        self._parser = p.Parser(hub.limits)
        self._parser.admitted = hub.secret is None
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._backlog: deque[p.Message] = deque()
        self._is_paused = False
        self._is_deaf = False
        self._violation: str | None = None
        self._nonces = (b"", b"")

    @property
    def address(self) -> tuple[str, int, str, int] | None:
        """Far address and port, near address and port; None when the peer has gone."""
        transport = self._transport
        if transport is None:
            return None
        far, near = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        return (far[0], far[1], near[0], near[1]) if far and near else None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of replies that the peer has not taken yet."""
        transport = self._transport
        waiting = 0 if transport is None else transport.get_write_buffer_size()
        return self._out_bytes + waiting

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the numeric peer, and turn it away if the server is full."""
        self._transport = cast(asyncio.Transport, transport)
        far = transport.get_extra_info("peername")
        if far:
            self.peer = f"{far[0]}:{far[1]}"
        self._transport.set_write_buffer_limits(high=self.hub.limits.unread_bytes)
        if not self.hub.accept(self):
            self.refuse(f"server is full ({self.hub.limits.num_connections} connections)")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Take back all that the peer waited for or arrived at."""
        self.standing = Standing.CLOSED
        self._backlog.clear()
        self._out.clear()
        self.hub.leave(self)

    def eof_received(self) -> bool:
        """Take back everything of a peer that sends no more, then close."""
        self.close()
        return False

    def pause_writing(self) -> None:
        """Stop reading: the peer does not read what it asked for."""
        self._is_paused = True
        self._stop_reading()

    def resume_writing(self) -> None:
        """Carry on with what was put off."""
        self._is_paused = False
        self._work_off()

    def data_received(self, data: bytes) -> None:
        """Cut out commands and carry them out."""
        parser = self._parser
        messages = parser.feed(data)
        is_inside = parser.is_inside_command
        if is_inside and self.is_inside_command and not messages:
            self.partial_bytes += len(data)
        elif is_inside and self.standing is Standing.MEMBER:
            self.since = self.hub.loop.time()
            self.partial_bytes = 0
        self.is_inside_command = is_inside
        if parser.violation is not None:
            self._violation = parser.violation
        if self._backlog or self._is_paused:
            self._backlog.extend(messages)
        else:
            self._carry_out(messages)
        if self._violation is not None and not self._backlog:
            self.refuse(self._violation)

    def _stop_reading(self) -> None:
        transport = self._transport
        if transport is not None and not self._is_deaf and not transport.is_closing():
            self._is_deaf = True
            transport.pause_reading()

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and self._is_deaf and not transport.is_closing():
            self._is_deaf = False
            transport.resume_reading()

    # Carrying out.

    def _carry_out(self, messages: Iterable[p.Message]) -> None:
        """Carry out messages in order; put the rest off while the peer's replies lie unread."""
        rest: Iterator[p.Message] = iter(messages)
        try:
            if self.standing is not Standing.MEMBER:
                self._receive_stranger(rest)
            if self._has_become(Standing.MEMBER):
                self._serve(rest)
        except ValueError as error:  # the protocol has no error reply for torch's commands
            self.refuse(str(error))
        if self.standing is not Standing.CLOSED:
            self._backlog.extend(rest)
        if self.state.woken:
            self.hub.deliver_woken()
        if self._out:
            self._flush()

    def _receive_stranger(self, messages: Iterator[p.Message]) -> None:
        """Carry out what one may ask who is no member, until it has become one."""
        for message in messages:
            if not self._is_admitted(message):
                return
            self._carry_out_one(message)
            if self._has_become(Standing.MEMBER):
                return

    def _has_become(self, standing: Standing) -> bool:
        return self.standing is standing

    def _carry_out_one(self, message: p.Message) -> None:
        query, *operands = message
        _HANDLERS[cast(int, query)](self, *operands)

    def _serve(self, messages: Iterator[Any]) -> None:
        """Carry out a member's messages until they end, it is closed, or it must read first.

        The two commands that come in floods are carried out right here.
        """
        state, out, pack = self.state, self._out, p.pack_u64
        values, waiting, promised = state.values, state.waiting, state.promised_to
        watched, present_by = state.watched, state.present_by
        is_crowded = self.hub.limits.num_keys - len(values) < _PACKET_COMMANDS
        for message in messages:
            query = message[0]
            if promised and self in promised and message[:2] != (p.QUEUE_POP, promised[self]):
                state.release_promise(self)
            if query == p.SET:
                if waiting or watched or present_by or is_crowded:
                    state.set(message[1], message[2])
                else:
                    values[message[1]] = message[2]
                continue
            if query == p.GET:
                value = values.get(message[1], b"")
                length = len(value)
                self._out_bytes += length + 8
                if length < _JOIN_BYTES:
                    out.append(pack(length) + value)
                else:
                    out += (pack(length), value)
            else:
                _HANDLERS[query](self, *message[1:])
                if self.standing is not Standing.MEMBER:
                    return
            if self._out_bytes > _FLUSH_BYTES:
                self._flush()
                if self._is_paused:
                    return

    def _work_off(self) -> None:
        """Carry out what was put off, then read on."""
        backlog, self._backlog = self._backlog, deque()
        if backlog:
            self._carry_out(backlog)
        if self._is_paused or self._backlog or self.standing is Standing.CLOSED:
            return
        if self._violation is not None:
            self.refuse(self._violation)
        else:
            self._read_on()

    def _reply_value(self, value: bytes) -> None:
        length = len(value)
        if length < _JOIN_BYTES:
            self._out.append(p.pack_u64(length) + value)
        else:
            self._out += (p.pack_u64(length), value)
        self._out_bytes += length + 8

    def _reply(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)

    def _reply_error(self, text: str) -> None:
        self._reply(p.frame(p.ERROR, text.encode()))

    def reply_later(self, reply: bytes) -> None:
        """Answer outside a command of this connection: a wake-up or an event."""
        if self.standing is Standing.CLOSED:
            return
        self._reply(reply)
        self._flush()

    def _flush(self) -> None:
        """Hand the replies to the transport in one write."""
        out, transport = self._out, self._transport
        size, self._out_bytes = self._out_bytes, 0
        if transport is not None and self.standing is not Standing.CLOSED:
            if len(out) == 1:
                transport.write(out[0])
            elif size < _FLUSH_BYTES:
                transport.write(b"".join(out))
            else:
                transport.writelines(out)
        out.clear()

    def refuse(self, why: str) -> None:
        """Close the connection for what it did, and say so in the log."""
        if self.standing is Standing.CLOSED:
            return
        self.hub.log_refusal(self, why)
        self.close()

    def close(self) -> None:
        """Close the connection; replies already earned are still sent if the peer reads them."""
        if self._out:
            self._flush()
        self.standing = Standing.CLOSED
        self.hub.leave(self)
        self._backlog.clear()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._is_paused:
            transport.abort()
            return
        transport.close()
        if transport.get_write_buffer_size():
            self.hub.loop.call_later(_LINGER_S, transport.abort)

    # Becoming a member.

    def _is_admitted(self, message: p.Message) -> bool:
        """Decide whether this message may be carried out; put it off or refuse otherwise."""
        query = message[0]
        if self.standing is Standing.CLOSED:
            return False
        if self.hub.secret is None:
            self.admit()
            return True
        if query == p.PING and message[1] == p.OUR_NONCE:
            self.standing = Standing.CHALLENGED
            return True
        if self.standing is Standing.CHALLENGED:
            if query in (p.HELLO, p.PROOF, p.PING):
                return True
            self.refuse(f"{p.NAMES[cast(int, query)]} before the secret was proved")
            return False
        self._backlog.append(message)
        if self.standing is Standing.NEW:
            self.standing = Standing.LOOKED_UP
            self._stop_reading()
            self.hub.look_up(self)
        return False

    def admit(self) -> None:
        """Make the peer a member."""
        self.standing = Standing.MEMBER
        self._parser.admitted = True

    def settle(self, is_allowed: bool) -> None:
        """Take the answer of the look-up of a torch client."""
        if self.standing is not Standing.LOOKED_UP:
            return
        if not is_allowed:
            self.refuse("a client without the secret, from an address that is not admitted")
            return
        self.admit()
        self._work_off()

    def _on_hello(self, client_nonce: bytes, version: int) -> None:
        if version != p.EXTENSION_VERSION or len(client_nonce) != trust.NONCE_BYTES:
            self._reply_error(f"extension version {version}, this server speaks 1")
            return
        secret = self.hub.secret
        server_nonce = trust.new_nonce() if secret else b""
        self._nonces = (client_nonce, server_nonce)
        proof = trust.server_proof(secret, client_nonce, server_nonce) if secret else b""
        self._reply(p.frame(p.OK, p.pack_strings((self.hub.instance, server_nonce, proof))))

    def _on_proof(self, mac: bytes) -> None:
        client_nonce, server_nonce = self._nonces
        self._nonces = (b"", b"")
        secret = self.hub.secret
        if secret is None:
            self._reply(p.frame(p.OK))
            return
        is_right = bool(server_nonce) and trust.is_equal(
            mac, trust.client_proof(secret, client_nonce, server_nonce)
        )
        if not is_right:
            self._reply_error("the secret is not this server's")
            self._flush()
            self.refuse("wrong secret")
            return
        self.admit()
        self._reply(p.frame(p.OK))

    # torch's commands.

    def _on_ping(self, nonce: int) -> None:
        self._reply(p.pack_u32(p.OUR_ANSWER if nonce == p.OUR_NONCE else nonce))

    def _on_set(self, key: bytes, value: bytes) -> None:
        self.state.set(key, value)

    def _on_get(self, key: bytes) -> None:
        self._reply_value(self.state.values.get(key, b""))

    def _on_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        self._reply_value(self.state.compare_set(key, expected, desired))

    def _on_add(self, key: bytes, amount: int) -> None:
        self._reply(p.pack_i64(self.state.add(key, amount)))

    def _on_check(self, keys: list[bytes]) -> None:
        is_present = all(map(self.state.is_present, keys))
        self._reply(p.CHECK_PRESENT if is_present else p.CHECK_MISSING)

    def _on_wait(self, keys: list[bytes]) -> None:
        if self._has_too_many_waiters():
            return
        wants = Wants.WAKE if self._parser.extensions else Wants.CLAIM
        if self.state.wait(self, wants, keys) is None:
            self._reply(p.WAIT_DONE)

    def _on_num_keys(self) -> None:
        self._reply(p.pack_i64(len(self.state.values)))

    def _on_delete(self, key: bytes) -> None:
        self._reply(p.pack_i64(int(self.state.delete(key))))

    def _on_append(self, key: bytes, value: bytes) -> None:
        size = len(self.state.values.get(key, b"")) + len(value)
        if size > self.hub.limits.value_bytes:
            raise ValueError(f"append: {show_key(key)} would hold {size} bytes")
        self.state.append(key, value)

    def _on_multi_get(self, keys: list[bytes]) -> None:
        values = [self.state.values.get(key, b"") for key in keys]
        if sum(map(len, values)) > self.hub.limits.reply_bytes:
            raise ValueError(f"multi_get of more than {self.hub.limits.reply_bytes} bytes")
        for value in values:
            self._reply_value(value)

    def _on_multi_set(self, strings: list[bytes]) -> None:
        self.state.set_many(zip(strings[::2], strings[1::2], strict=True))

    def _on_cancel_wait(self) -> None:
        for waiter in self.state.waiters_of(self):
            self.state.withdraw(waiter)
        self._reply(p.WAIT_CANCELLED)

    def _on_queue_push(self, key: bytes, item: bytes) -> None:
        self.state.push(key, item)

    def _on_queue_pop(self, key: bytes) -> None:
        count, item = self.state.pop(key, self)
        self._reply(p.pack_i64(count))
        if count:
            self._reply_value(item)

    def _on_queue_len(self, key: bytes) -> None:
        self._reply(p.pack_i64(self.state.queue_length(key)))

    def _on_list_keys(self) -> None:
        keys = self.state.values
        self._reply(p.pack_i64(len(keys)) + p.pack_strings(keys))

    def _on_barrier(self, key: bytes, world_size: int) -> None:
        if self._has_too_many_waiters():
            return
        self.state.arrive(self, Wants.BARRIER, key, -1, world_size)

    # Our extensions.

    def _has_too_many_waiters(self) -> bool:
        if len(self.state.waiters_of(self)) < self.hub.limits.num_waiters:
            return False
        self.refuse(f"more than {self.hub.limits.num_waiters} open waits")
        return True

    def _on_cancel(self) -> None:
        waiters = self.state.waiters_of(self)
        if not waiters:
            self._reply(p.frame(p.NOTHING))
            return
        for waiter in waiters:
            world_size, came, missing = self.state.withdraw(waiter)
            self._reply(p.frame(p.CANCELLED, p.pack_integers((world_size, came, *missing))))

    def _on_gather(self, key: bytes, rank: int, world_size: int, value: bytes) -> None:
        self._arrive(Wants.GATHER, key, rank, world_size, value)

    def _on_arrive(self, key: bytes, rank: int, world_size: int) -> None:
        self._arrive(Wants.BARRIER, key, rank, world_size, b"")

    def _arrive(self, wants: Wants, key: bytes, rank: int, world_size: int, value: bytes) -> None:
        if self._has_too_many_waiters():
            return
        try:
            waiter = self.state.arrive(self, wants, key, rank, world_size, value)
        except ValueError as error:
            self._reply_error(str(error))
            return
        waiter.is_framed = True

    def _on_ack_set(self, key: bytes, value: bytes) -> None:
        self._acknowledge(lambda: self.state.set(key, value))

    def _on_ack_add(self, key: bytes, amount: int) -> None:
        self._acknowledge(lambda: p.pack_i64(self.state.add(key, amount)))

    def _acknowledge(self, act: Callable[[], bytes | None]) -> None:
        """Answer with what `act` returns, or with why it cannot."""
        try:
            self._reply(p.frame(p.OK, act() or b""))
        except ValueError as error:
            self._reply_error(str(error))

    def _on_await_get(self, key: bytes) -> None:
        if self._has_too_many_waiters():
            return
        waiter = self.state.wait(self, Wants.VALUE, [key])
        if waiter is None:
            self._reply(p.frame(p.OK, self.state.values[key]))
        else:
            waiter.is_framed = True

    def _on_await_pop(self, key: bytes) -> None:
        if self._has_too_many_waiters():
            return
        result = self.state.wait_item(self, key)
        if isinstance(result, bytes):
            self._reply(p.frame(p.OK, result))
        else:
            result.is_framed = True

    def _on_watch(self, keys: list[bytes]) -> None:
        self.hub.watch(self, keys)
        self._reply(p.frame(p.OK))

    def _on_presence(self, key: bytes, value: bytes) -> None:
        self._acknowledge(lambda: self.state.set_presence(self, key, value))

    def _on_statistics(self) -> None:
        self._reply(p.frame(p.OK, self.hub.statistics().to_json()))

    # Deliveries.

    def deliver(self, waiter: Waiter, gathered: bytes) -> None:
        """Answer a waiter of this connection that was woken or has failed.

        `gathered` is the finished reply of a gather, which all its ranks share.
        """
        if waiter.failure is not None and not waiter.is_framed:
            self.refuse(waiter.failure)
        elif waiter.failure is not None:
            self.reply_later(p.frame(p.ERROR, waiter.failure.encode()))
        elif waiter.values is not None:
            self.reply_later(gathered)
        elif waiter.is_framed:
            self.reply_later(p.frame(p.OK, waiter.value))
        else:
            self.reply_later(p.WAIT_DONE)

    def push_event(self, event: bytes) -> None:
        """Send a watched key's change; a watcher that does not read is closed."""
        if self._is_paused:
            self.refuse("watches keys and does not read their events")
            return
        self.reply_later(event)


_HANDLERS: dict[int, Callable[..., None]] = {
    p.SET: Connection._on_set,
    p.GET: Connection._on_get,
    p.COMPARE_SET: Connection._on_compare_set,
    p.ADD: Connection._on_add,
    p.CHECK: Connection._on_check,
    p.WAIT: Connection._on_wait,
    p.NUM_KEYS: Connection._on_num_keys,
    p.DELETE_KEY: Connection._on_delete,
    p.APPEND: Connection._on_append,
    p.MULTI_GET: Connection._on_multi_get,
    p.MULTI_SET: Connection._on_multi_set,
    p.CANCEL_WAIT: Connection._on_cancel_wait,
    p.PING: Connection._on_ping,
    p.QUEUE_PUSH: Connection._on_queue_push,
    p.QUEUE_POP: Connection._on_queue_pop,
    p.QUEUE_LEN: Connection._on_queue_len,
    p.LIST_KEYS: Connection._on_list_keys,
    p.BARRIER: Connection._on_barrier,
    p.HELLO: Connection._on_hello,
    p.PROOF: Connection._on_proof,
    p.CANCEL: Connection._on_cancel,
    p.GATHER: Connection._on_gather,
    p.ARRIVE: Connection._on_arrive,
    p.ACK_SET: Connection._on_ack_set,
    p.ACK_ADD: Connection._on_ack_add,
    p.AWAIT_GET: Connection._on_await_get,
    p.AWAIT_POP: Connection._on_await_pop,
    p.WATCH: Connection._on_watch,
    p.PRESENCE: Connection._on_presence,
    p.STATISTICS: Connection._on_statistics,
}
