"""Handle one of the server's connections. All methods run on the server's event loop.

The connection owns its parser, its unsent replies and its deferred commands. Its waits are stored
in the shared `StoreState`, with the connection as their owner. Closing the connection withdraws the
waits.

The replies to one packet are sent in one write, unless the packet's commands take longer than one
time slice of the event loop (see `turns.py`). If the size of the unread replies exceeds
`Limits.unread_bytes`, the server stops reading and executing the peer's commands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Generator, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from echelon.errors import StoreProtocolError
from echelon.store.server.deliveries import Deliveries
from echelon.store.server.native import Executor, Receiver, make_receiver
from echelon.store.server.outbox import FLUSH_BYTES, Outbox
from echelon.store.server.queries import HANDLERS
from echelon.store.server.service import release_unless_popped, serve
from echelon.store.state.waiters import Waiter
from echelon.store.wire import protocol as p
from echelon.store.wire.parser import Parser
from echelon.store.wire.seal import Opener, Sealer

if TYPE_CHECKING:
    from echelon.store.server.hub import Hub

_CHUNK_BYTES = 16 << 10  # parsed between two looks at the clock
_LINGER_S = 2.0  # how long a closed connection's last replies may take


class Standing(Enum):
    """The stages of a connection, from its acceptance to its end."""

    NEW = "new"  # must say VALIDATE, then PING
    CHALLENGED = "challenged"  # ours; owes a proof of the secret
    LOOKED_UP = "looked up"  # torch's; the kernel is asked whose process it is
    MEMBER = "member"
    CLOSED = "closed"


class Peer(asyncio.Protocol):
    """The connection to one peer. All methods run on the server's loop.

    Attributes:
        peer: "address:port" of the peer.
        standing: the stage that the connection has reached.
        since: the loop's time at which the connection was accepted or, for a member, the latest
            incomplete command began.
        is_inside_command: True while the last command received is incomplete.
        transcript: the bytes of the handshake (see `trust.transcript`).
        partial_bytes: the number of bytes received so far for an incomplete command.
        session: the bytes that identify the client; b"" for torch's clients.
        watches: the keys of each watch, indexed by the watch's tag.
        out: the unsent replies.
        deliveries: the answers to waits and the events of watches.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.state = hub.state
        self.peer = "?"
        self.standing = Standing.NEW
        self.since = hub.loop.time()
        self.partial_bytes = 0
        self.is_inside_command = True
        self.session = b""
        self.watches: dict[int, set[bytes]] = {}
        self.deliveries = Deliveries(self)
        self._parser = Parser(hub.limits)
        self._parser.admitted = hub.secret is None
        self._transport: asyncio.Transport | None = None
        self.out = Outbox(hub.limits.unread_bytes)
        self._rest = b""  # received after what the backlog was cut out of
        self._backlog: deque[p.Message] = deque()
        self._is_choked = False  # the peer does not read its replies
        self._is_busy = False  # an answer is made in slices, or others have their turn
        self._is_paused = False  # either
        self._is_deaf = False
        self._executor = hub.executor
        self._receiver: Receiver | None = None
        if hub.executor is not None:
            self._receiver = make_receiver(hub.executor, hub.state, self.data_received)
            self.out.receiver = self._receiver
            self.data_received = self._receiver  # type: ignore[assignment]
        self.transcript = b""
        self._opener: Opener | None = None

    @property
    def address(self) -> tuple[str, int, str, int] | None:
        """The remote address and port, then the local address and port; None if disconnected."""
        transport = self._transport
        if transport is None:
            return None
        far, near = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        return (far[0], far[1], near[0], near[1]) if far and near else None

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor, or -1 if it is closed."""
        held = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if held is None else int(held.fileno())

    @property
    def is_deaf(self) -> bool:
        """True if the server has stopped reading from the peer."""
        return self._is_deaf

    @property
    def num_unread_bytes(self) -> int:
        """The number of reply bytes that the peer has not read yet."""
        return self.out.num_unread_bytes

    @property
    def is_paused(self) -> bool:
        """True if the peer's commands are deferred."""
        return self._is_paused

    @property
    def is_closed(self) -> bool:
        """True if the connection is closed or closing."""
        return self.standing is Standing.CLOSED

    @property
    def is_executing(self) -> bool:
        """True if the peer is a member whose commands can be executed now."""
        return self.standing is Standing.MEMBER and not self._is_busy

    @property
    def is_ours(self) -> bool:
        """True if the peer has announced itself as an echelon client."""
        return self._parser.extensions

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the peer's numeric address, and refuse the peer if the server is full."""
        self._transport = self.out.transport = cast(asyncio.Transport, transport)
        if self._receiver is not None:
            self._receiver.write = self._transport.write
            self._receiver.num_queued = self._transport.get_write_buffer_size
            self._receiver.descriptor = self.descriptor
        far = transport.get_extra_info("peername")
        if far:
            self.peer = f"{far[0]}:{far[1]}"
        self._transport.set_write_buffer_limits(high=self.hub.limits.unread_bytes)
        if not self.hub.accept(self):
            self.refuse(f"server is full ({self.hub.limits.num_connections} connections)")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Remove all state that belongs to the peer, such as its waits."""
        self.standing = Standing.CLOSED
        self._leave_plain()
        self._backlog.clear()
        self._rest = b""
        self.deliveries.drop()
        self.out.drop()
        self.hub.leave(self)

    def eof_received(self) -> bool:
        """Close the connection, and remove all state that belongs to the peer."""
        self.close()
        return False

    def pause_writing(self) -> None:
        """Stop reading, because the peer is not reading its replies."""
        self._is_choked = True
        self._pause()

    def _pause(self) -> None:
        """Defer all further commands from the peer."""
        self._is_paused = True
        self._leave_plain()
        self.stop_reading()

    def _leave_plain(self) -> None:
        """Leave the fast path: route received bytes through `data_received`."""
        if self._receiver is not None:
            self._receiver.is_plain = False

    def resume_writing(self) -> None:
        """Continue with the deferred replies and commands."""
        self._is_choked = False
        if self.out:
            self.flush()
        self._resume()

    def _resume(self) -> None:
        """Deliver deferred answers; once none are left, execute deferred commands."""
        self._is_paused = self._is_choked or self._is_busy
        self.deliveries.deliver_parked()
        if not self.deliveries:
            self._work_off()

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes and execute the commands that are now complete."""
        self._receive(data)
        receiver = self._receiver
        if receiver is not None:
            receiver.is_ours = self._parser.extensions
            receiver.is_plain = (
                self._is_flowing
                and self._opener is None
                and not self.is_inside_command
                and not self._parser.is_inside_command
            )

    def _receive(self, data: bytes) -> None:
        num_bytes = len(data)
        self.hub.turns.begin()
        if self._opener is not None:
            try:
                data = self._opener.open(data)
            except StoreProtocolError as error:
                self.refuse(str(error))
                return
        self._rest += data
        self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        """Execute commands from the received bytes until the time slice is used up.

        Args:
            num_bytes: the number of bytes received since the last call.
        """
        has_completed = False
        while self._rest and not self._must_wait:
            if self._executor is not None and self._is_plain:
                has_completed |= self._execute_plain(self._executor)
                if not self._rest or self._must_wait:
                    break
            chunk, self._rest = self._rest[:_CHUNK_BYTES], self._rest[_CHUNK_BYTES:]
            messages = self._parser.feed(chunk)
            has_completed |= bool(messages)
            self._carry_out(messages)
            if self._rest and self.hub.turns.is_over:
                self.put_off()
        self._note_progress(num_bytes, has_completed)
        if self._parser.violation is not None and not self._backlog and not self._is_busy:
            self.refuse(self._parser.violation)

    def _execute_plain(self, executor: Executor) -> bool:
        """Execute the next commands without the parser, as long as `_is_plain` is True.

        A command that started in an earlier packet is completed first. Return whether any command
        was completed.
        """
        has_completed, data = False, self._rest
        if self._parser.is_inside_command and len(data) <= _CHUNK_BYTES:
            messages, data = self._parser.finish(data)
            has_completed, self._rest = bool(messages), data
            self._carry_out(messages)
        position, size = 0, len(data)
        while position < size and self._is_plain and not self._parser.is_inside_command:
            start = position
            position, replies = executor(data, position, self._parser.extensions)
            has_completed |= position > start
            if replies:
                self.out.put(replies)
                self.flush()
            if len(replies) < FLUSH_BYTES:
                break
        if position:
            self._rest = data[position:]
        return has_completed

    @property
    def _must_wait(self) -> bool:
        """True if received commands must be deferred."""
        return bool(self._backlog) or self._is_paused or self.standing is Standing.CLOSED

    @property
    def _is_flowing(self) -> bool:
        """True if the peer is a member whose commands can be executed on arrival."""
        return self.standing is Standing.MEMBER and not self._must_wait

    @property
    def _is_plain(self) -> bool:
        """True if the peer's next commands can take the fast path for plain commands."""
        promised = self.state.promised_to
        return self._is_flowing and (not promised or self not in promised)

    def _note_progress(self, num_bytes: int, has_completed: bool) -> None:
        """Record the start and the size of an incomplete command."""
        is_inside = self._parser.is_inside_command or (
            self._opener is not None and self._opener.is_inside_record
        )
        if is_inside and self.is_inside_command and not has_completed:
            self.partial_bytes += num_bytes
        elif is_inside and self.standing is Standing.MEMBER:
            self.since = self.hub.loop.time()
            self.partial_bytes = 0
        self.is_inside_command = is_inside

    def stop_reading(self) -> None:
        """Stop reading from the peer."""
        transport = self._transport
        if transport is not None and not self._is_deaf and not transport.is_closing():
            self._is_deaf = True
            transport.pause_reading()

    def read_on_unless_put_off(self) -> None:
        """Resume reading from the peer, unless deferred commands must be executed first."""
        if not self._is_paused and not self._backlog and not self._rest:
            self._read_on()

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and self._is_deaf and not transport.is_closing():
            self._is_deaf = False
            if self.standing is Standing.MEMBER:
                self.since = self.hub.loop.time()
            transport.resume_reading()

    # Carrying out.

    def _carry_out(self, messages: Collection[p.Message]) -> None:
        """Execute parsed commands in order; defer the rest if the peer must wait."""
        if len(messages) == 1 and self._is_flowing:
            (message,) = messages
            if cast(int, message[0]) < p.RUN:
                self._carry_out_one(message)
                return
        rest: Iterator[p.Message] = iter(messages)
        try:
            if messages and self.hub.secret is None and self.standing is Standing.NEW:
                self.admit()
            if self.standing is not Standing.MEMBER:
                self._receive_stranger(rest)
                self._demand_nothing_unsealed(rest)
            if self._has_become(Standing.MEMBER):
                rest = serve(self, rest)
        except ValueError as error:  # the protocol has no error reply for torch's commands
            self.refuse(str(error))
        if self.standing is not Standing.CLOSED:
            self._backlog.extend(rest)
        if self.state.woken:
            self.hub.deliver_woken()
        if self.out:
            self.flush()

    def _receive_stranger(self, messages: Iterator[p.Message]) -> None:
        """Execute the commands that a peer is allowed to send before its standing is MEMBER."""
        for message in messages:
            if not self._is_admitted(message):
                return
            query, *operands = message
            HANDLERS[cast(int, query)](self, *operands)
            if self._has_become(Standing.MEMBER):
                return

    def _demand_nothing_unsealed(self, rest: Iterator[p.Message]) -> None:
        """Refuse the peer if its packet contains unsealed bytes after the proof."""
        if self.is_sealed and (
            self._rest or next(rest, None) is not None or self._parser.is_inside_command
        ):
            self.refuse("the client sent unsealed bytes after the proof")

    @property
    def is_sealed(self) -> bool:
        """True if the peer's stream is sealed."""
        return self._opener is not None

    def seal(self, to_server: bytes, to_client: bytes) -> None:
        """Accept and send only sealed records from now on."""
        self._opener, self.out.sealer = Opener(to_server), Sealer(to_client)

    def _has_become(self, standing: Standing) -> bool:
        return self.standing is standing

    def _carry_out_one(self, message: Any) -> None:
        """Execute a single command from a member. This is a fast path of `_carry_out`."""
        state = self.state
        if state.promised_to and self in state.promised_to:
            release_unless_popped(self, message)
        try:
            HANDLERS[message[0]](self, *message[1:])
        except ValueError as error:
            self.refuse(str(error))
        if state.woken:
            self.hub.deliver_woken()
        if self.out:
            self.flush()

    def put_off(self) -> None:
        """Defer this peer's remaining commands until other peers have had a turn."""
        if self._is_busy:
            return
        self._is_busy = True
        self._pause()
        self.hub.turns.put_off(self._continue)

    def _continue(self) -> None:
        if self.standing is not Standing.CLOSED:
            self._is_busy = False
            self._resume()

    def _work_off(self) -> None:
        """Execute the deferred commands, then resume reading."""
        if self._is_paused:
            return
        self.hub.turns.begin()
        backlog, self._backlog = self._backlog, deque()
        if backlog:
            self._carry_out(backlog)
        if self._rest or self._parser.violation is not None:
            self._take(0)
        if not self._must_wait:
            self._read_on()

    def answer_in_slices(self, steps: Generator[None, None, list[bytes]]) -> None:
        """Answer with the bytes that `steps` returns, running one step per loop iteration.

        This peer's later commands wait until the answer is complete.
        """
        pieces = self._next_slice(steps)
        if pieces is not None:
            self.out.put_all(pieces)
            return
        self._is_busy = True
        self._pause()
        self.hub.turns.put_off(partial(self._continue_slices, steps))

    def _continue_slices(self, steps: Generator[None, None, list[bytes]]) -> None:
        if self.standing is Standing.CLOSED:
            return
        try:
            pieces = self._next_slice(steps)
        except ValueError as error:
            self.refuse(str(error))
            return
        if pieces is None:
            self.hub.turns.put_off(partial(self._continue_slices, steps))
            return
        self.out.put_all(pieces)
        self.flush()
        self._is_busy = False
        self._resume()

    @staticmethod
    def _next_slice(steps: Generator[None, None, list[bytes]]) -> list[bytes] | None:
        """Run one of an answer's steps; return the answer if this was the last step, else None."""
        try:
            next(steps)
        except StopIteration as done:
            pieces: list[bytes] = done.value
            return pieces
        return None

    def answer_later(self, status: int, tag: int, payload: bytes) -> None:
        """Send the answer to an earlier query of this peer, such as a wait or a watch."""
        if self.standing is not Standing.CLOSED:
            self.out.put_frame(status, tag, payload)
            self.flush()

    def flush(self) -> None:
        """Pass the replies to the transport, or drop them if the connection is closed."""
        if self.standing is Standing.CLOSED:
            self.out.drop()
        else:
            self.out.flush()

    def refuse(self, why: str) -> None:
        """Close the connection after a protocol violation or an exceeded limit; log the reason."""
        if self.standing is Standing.CLOSED:
            return
        self.hub.log_refusal(self, why)
        if self.is_ours:
            self.out.put_frame(p.ERROR, 0, why.encode("utf-8", "replace"))
        self.close()

    def close(self) -> None:
        """Close the connection after sending any replies that the peer can still receive."""
        if self.out:
            self.flush()
        self.standing = Standing.CLOSED
        self._leave_plain()
        self.hub.leave(self)
        self._backlog.clear()
        self._rest = b""
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
        """Return whether a command can be executed now; if not, defer it or disconnect the peer."""
        query = message[0]
        if self.standing is Standing.CLOSED:
            return False
        if query == p.PING and message[1] == p.OUR_NONCE:
            self.standing = Standing.CHALLENGED
            return True
        if self.standing is Standing.CHALLENGED:
            if query in (p.HELLO, p.PROOF, p.PING):
                return True
            self.refuse(f"{p.NAMES[cast(int, query)]} arrived before the secret was proved")
            return False
        self._backlog.append(message)
        if self.standing is Standing.NEW:
            self.standing = Standing.LOOKED_UP
            self.stop_reading()
            self.hub.look_up(self)
        return False

    def admit(self) -> None:
        """Admit the peer as a member."""
        self.standing = Standing.MEMBER
        self.hub.strangers.discard(self)
        self._parser.admitted = True

    def settle(self, is_allowed: bool) -> None:
        """Admit or refuse a torch client, as determined by `Hub.look_up`."""
        if self.standing is not Standing.LOOKED_UP:
            return
        if not is_allowed:
            self.refuse("a client without the secret, from an address that is not admitted")
            return
        self.admit()
        self._work_off()

    def waiter_of(self, tag: int) -> Waiter | None:
        """Return the peer's waiter with the given tag, or None if the peer has no such waiter."""
        return next((w for w in self.state.waiters_of(self) if w.tag == tag), None)
