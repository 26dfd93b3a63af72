"""One connection of the server: messages in, replies out, on the event loop.

The connection owns its parser, its unsent replies and, while its peer reads too slowly, the
messages that were read but not yet carried out. What it waits for lives in the shared
`StoreState` under the connection as owner, so that closing it takes everything back.

Replies of one received packet leave in one write, unless its commands take longer than a slice of
the loop's time: then the rest waits its turn (see `turns.py`). When more than
`Limits.unread_bytes` lie unread, the connection stops carrying out commands and stops reading
until the peer has caught up: a slow reader costs the server at most that plus one reply and one
packet of commands.
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
    """How far a peer has got."""

    NEW = "new"  # must say VALIDATE, then PING
    CHALLENGED = "challenged"  # ours; owes a proof of the secret
    LOOKED_UP = "looked up"  # torch's; the kernel is asked whose process it is
    MEMBER = "member"
    CLOSED = "closed"


class Peer(asyncio.Protocol):
    """Serve one peer. All methods run on the server's loop.

    Attributes:
        peer: "address:port" of the peer.
        standing: how far it has got.
        since: loop time of the accept, or of the first byte of an incomplete command.
        is_inside_command: whether the peer has begun a command and not completed it.
        transcript: of the handshake under way, what its proofs cover.
        partial_bytes: what came of the incomplete command.
        session: which client this is, b"" of torch's.
        watches: the keys of each watch, by its tag.
        out: its unsent replies.
        deliveries: what it is sent outside its own commands.
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
        """Far address and port, near address and port; None when the peer has gone."""
        transport = self._transport
        if transport is None:
            return None
        far, near = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        return (far[0], far[1], near[0], near[1]) if far and near else None

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor, -1 when it is closed."""
        held = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if held is None else int(held.fileno())

    @property
    def is_deaf(self) -> bool:
        """Whether the server does not read from the peer, whose time stands still then."""
        return self._is_deaf

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of replies that the peer has not taken yet."""
        return self.out.num_unread_bytes

    @property
    def is_paused(self) -> bool:
        """Whether the peer's commands are put off."""
        return self._is_paused

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed, or is being closed."""
        return self.standing is Standing.CLOSED

    @property
    def is_executing(self) -> bool:
        """Whether the next of a member's commands may be executed."""
        return self.standing is Standing.MEMBER and not self._is_busy

    @property
    def is_ours(self) -> bool:
        """Whether the peer has announced itself as our client."""
        return self._parser.extensions

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the numeric peer, and turn it away if the server is full."""
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
        """Take back all that the peer waited for or arrived at."""
        self.standing = Standing.CLOSED
        self._leave_plain()
        self._backlog.clear()
        self._rest = b""
        self.deliveries.drop()
        self.out.drop()
        self.hub.leave(self)

    def eof_received(self) -> bool:
        """Take back everything of a peer that sends no more, then close."""
        self.close()
        return False

    def pause_writing(self) -> None:
        """Stop reading: the peer does not read what it asked for."""
        self._is_choked = True
        self._pause()

    def _pause(self) -> None:
        """Put off what the peer sends from here on."""
        self._is_paused = True
        self._leave_plain()
        self.stop_reading()

    def _leave_plain(self) -> None:
        """Have everything that arrives go through `data_received` until it says otherwise."""
        if self._receiver is not None:
            self._receiver.is_plain = False

    def resume_writing(self) -> None:
        """Continue with the replies and commands that were put off."""
        self._is_choked = False
        if self.out:
            self.flush()
        self._resume()

    def _resume(self) -> None:
        """Deliver what was parked, then execute what was put off unless it must wait longer."""
        self._is_paused = self._is_choked or self._is_busy
        self.deliveries.deliver_parked()
        if not self.deliveries:
            self._work_off()

    def data_received(self, data: bytes) -> None:
        """Cut out commands and execute them.

        In front of it stands the C core's receiver, which executes plain commands without Python
        while `is_plain` says that it may. Here alone that becomes true.
        """
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
        """Cut commands out of what was received and execute them, until the slice is used up.

        Args:
            num_bytes: how much was received since the last call.
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
        """Execute the plain commands at the start of the rest without the parser.

        A command that an earlier packet began is completed first. Returns whether any was executed.
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
        """Whether nothing more may be executed now."""
        return bool(self._backlog) or self._is_paused or self.standing is Standing.CLOSED

    @property
    def _is_flowing(self) -> bool:
        """Whether a member's command may be carried out as soon as it comes."""
        return self.standing is Standing.MEMBER and not self._must_wait

    @property
    def _is_plain(self) -> bool:
        """Whether plain commands may be executed as soon as they arrive, on plain keys alone."""
        promised = self.state.promised_to
        return self._is_flowing and (not promised or self not in promised)

    def _note_progress(self, num_bytes: int, has_completed: bool) -> None:
        """Note since when a command is incomplete, and how much of it came."""
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
        """Leave what the peer sends from here on to the kernel."""
        transport = self._transport
        if transport is not None and not self._is_deaf and not transport.is_closing():
            self._is_deaf = True
            transport.pause_reading()

    def read_on_unless_put_off(self) -> None:
        """Read again unless commands are put off, whose turn comes first."""
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
        """Carry out messages in order; put the rest off while the peer's replies lie unread."""
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
        """Carry out the requests that a peer may make before it is a member."""
        for message in messages:
            if not self._is_admitted(message):
                return
            query, *operands = message
            HANDLERS[cast(int, query)](self, *operands)
            if self._has_become(Standing.MEMBER):
                return

    def _demand_nothing_unsealed(self, rest: Iterator[p.Message]) -> None:
        """Refuse a peer whose packet continued after its proof: that may be another's bytes."""
        if self.is_sealed and (
            self._rest or next(rest, None) is not None or self._parser.is_inside_command
        ):
            self.refuse("bytes after the proof that are not sealed")

    @property
    def is_sealed(self) -> bool:
        """Whether every byte of the peer proves that it is a member's."""
        return self._opener is not None

    def seal(self, to_server: bytes, to_client: bytes) -> None:
        """Demand records from the peer from its next byte on, and send records."""
        self._opener, self.out.sealer = Opener(to_server), Sealer(to_client)

    def _has_become(self, standing: Standing) -> bool:
        return self.standing is standing

    def _carry_out_one(self, message: Any) -> None:
        """Carry out a member's only message: what `_carry_out` does, with less around it."""
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
        """Let other peers have their turn before the next command.

        A peer that is busy has its place in the queue, for its commands or for a long answer, which
        a second place would overtake.
        """
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
        """Carry out what was put off, then read on."""
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
        """Answer with the bytes that `steps` returns, made in one turn of the loop per step.

        Other peers are served between the steps. What this peer sends after the command waits.
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
        """Take one step; return what was made once it is complete."""
        try:
            next(steps)
        except StopIteration as done:
            pieces: list[bytes] = done.value
            return pieces
        return None

    def answer_later(self, status: int, tag: int, payload: bytes) -> None:
        """Answer outside a command of this connection: a wake-up or an event."""
        if self.standing is not Standing.CLOSED:
            self.out.put_frame(status, tag, payload)
            self.flush()

    def flush(self) -> None:
        """Hand the replies to the transport, or drop them if the connection is closed."""
        if self.standing is Standing.CLOSED:
            self.out.drop()
        else:
            self.out.flush()

    def refuse(self, why: str) -> None:
        """Close the connection for what it did, and say so in the log."""
        if self.standing is Standing.CLOSED:
            return
        self.hub.log_refusal(self, why)
        if self.is_ours:
            self.out.put_frame(p.ERROR, 0, why.encode("utf-8", "replace"))
        self.close()

    def close(self) -> None:
        """Close the connection; replies already earned are still sent if the peer reads them."""
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
        """Decide whether this message may be carried out; put it off or refuse otherwise."""
        query = message[0]
        if self.standing is Standing.CLOSED:
            return False
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
            self.stop_reading()
            self.hub.look_up(self)
        return False

    def admit(self) -> None:
        """Make the peer a member."""
        self.standing = Standing.MEMBER
        self.hub.strangers.discard(self)
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

    def waiter_of(self, tag: int) -> Waiter | None:
        """Return what waits under a tag."""
        return next((w for w in self.state.waiters_of(self) if w.tag == tag), None)
