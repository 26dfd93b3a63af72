"""Manage the state that all connections of a server share.

All methods run on the server's event loop. The hub answers waits and pushes changes to watches. A
separate thread reads the kernel's socket tables to find out which users run the local torch
clients. Once per second, the hub closes connections that have exceeded a time limit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

from echelon.host.tcp_table import owner_uids, plain_address
from echelon.store.server.native import make_executor
from echelon.store.server.peer import Peer, Standing
from echelon.store.server.slices import total_bytes
from echelon.store.server.turns import Turns
from echelon.store.state.leases import Leases
from echelon.store.state.state import StoreState, show_key
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.limits import Limits
from echelon.store.wire.statistics import StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

log = logging.getLogger("echelon.store")

_SWEEP_S = 1.0
_REFUSALS_LOGGED = 20  # between two sweeps, a second; strangers must not fill the log
_SHOWN_RANKS = 64
_DELIVERED_AT_ONCE = 64  # waiters, between two looks at the clock
_PROGRESS_BYTES = 64 << 10


class Hub:
    """The state and the connections of one server.

    Attributes:
        state: the keys, queues and waiters.
        limits: the limits on the server and on each peer.
        secret: the secret that echelon's clients must share; None if no secret is required.
        instance: random bytes that let a client detect a restarted server.
        executor: the C executor of plain commands; None without the C core.
        turns: the queue of the peers' deferred work.
        leases: the presences.
        connections: all open connections.
        strangers: the open connections whose peers have not become members yet.
        admitted_addresses: numeric addresses from which torch's clients are admitted.
        num_refused: the number of connections that the server closed because it refused the peer.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: Limits, secret: bytes | None
    ) -> None:
        self.loop = loop
        self.limits = limits
        self.secret = secret
        self.state = StoreState(limits.num_keys)
        self.state.on_change = self._push_change
        self.executor = make_executor(self.state, limits)
        self.turns = Turns(loop)
        self.leases = Leases(self.state, loop.time)
        self.instance = secrets.token_bytes(16)
        self.admitted_addresses: set[str] = set()
        self.num_refused = 0
        self._num_logged = 0
        self._num_unlogged = 0
        self.connections: set[Peer] = set()
        self.strangers: set[Peer] = set()
        self._num_in_session: Counter[bytes] = Counter()
        self._watchers: dict[bytes, dict[tuple[Peer, int], None]] = {}
        self._asked: dict[Peer, tuple[str, int, str, int]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._old_promises: dict[Any, bytes] = {}
        self._is_delivering = False  # the rest of the woken waiters is put off
        self._gathered: tuple[list[bytes] | None, bytes] = (None, b"")
        self._sweep_s = min(_SWEEP_S, limits.handshake_s / 2, limits.command_s / 2)
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)

    # Members.

    def accept(self, connection: Peer) -> bool:
        """Accept a new connection, or return False if the server is full."""
        if len(self.connections) >= self.limits.num_connections:
            return False
        if len(self.strangers) >= self.limits.num_strangers:
            return False
        self.connections.add(connection)
        self.strangers.add(connection)
        return True

    def join_session(self, connection: Peer, session: bytes) -> None:
        """Record which client a connection belongs to."""
        if not connection.session:
            connection.session = session
            self._num_in_session[session] += 1

    def leave(self, connection: Peer) -> None:
        """Remove all state that belongs to a connection. Repeated calls have no effect."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.strangers.discard(connection)
        for tag in list(connection.watches):
            self.unwatch(connection, tag)
        self.state.forget(connection)
        if connection.session:
            self._num_in_session[connection.session] -= 1
            if not self._num_in_session[connection.session]:
                del self._num_in_session[connection.session]
                self.leases.has_closed(connection.session)
        if self.state.woken:
            self.deliver_woken()

    def log_refusal(self, connection: Peer, why: str) -> None:
        """Log a refused peer and the reason; if refusals are too frequent, only count them."""
        self.num_refused += 1
        if self._num_logged < _REFUSALS_LOGGED:
            self._num_logged += 1
            log.warning("store: closed %s: %s", connection.peer, why)
        else:
            self._num_unlogged += 1

    def _log_unlogged(self) -> None:
        """Log how many connections were closed for invalid data but not logged individually."""
        self._num_logged = 0
        number, self._num_unlogged = self._num_unlogged, 0
        if number:
            log.warning("store: closed %d more connections that sent invalid data", number)

    def close(self) -> None:
        """Close all connections and stop the periodic checks."""
        self._log_unlogged()
        self._sweeper.cancel()
        if self._asking is not None:
            self._asking.cancel()
        for connection in list(self.connections):
            connection.close()

    def publish(self, key: bytes, value: bytes) -> None:
        """Store a value, and answer the waiters for its key."""
        self.state.set(key, value)
        self.deliver_woken()

    def post(self, folder: bytes, value: bytes) -> None:
        """Store a value under the first of the keys FOLDER/0, FOLDER/1, ... that is free."""
        keys = (b"%s/%d" % (folder, number) for number in itertools.count())
        self.publish(next(key for key in keys if not self.state.is_present(key)), value)

    def renew(self) -> None:
        """Close all connections, drop all keys and choose a new instance ID."""
        for connection in list(self.connections):
            connection.close()
        self.state = StoreState(self.limits.num_keys)
        self.state.on_change = self._push_change
        self.executor = make_executor(self.state, self.limits)
        self.leases = Leases(self.state, self.loop.time)
        self.instance = secrets.token_bytes(16)
        self._old_promises = {}

    # Deliveries.

    def deliver_woken(self) -> None:
        """Answer the waiters that recent commands satisfied, taking at most one time slice."""
        woken = self.state.woken
        while woken:
            batch, woken[:_DELIVERED_AT_ONCE] = woken[:_DELIVERED_AT_ONCE], []
            for waiter in batch:
                assert isinstance(waiter.owner, Peer)
                waiter.owner.deliveries.deliver(waiter, self._pack_gathered(waiter.values))
            if woken and self.turns.is_over:
                if not self._is_delivering:
                    self._is_delivering = True
                    self.turns.put_off(self._deliver_on)
                return
        self._gathered = (None, b"")

    def deliver_woken_to(self, connection: Peer) -> None:
        """Answer those waiters of one connection that have been woken."""
        woken = self.state.woken
        if woken:
            own = [waiter for waiter in woken if waiter.owner is connection]
            woken[:] = [waiter for waiter in woken if waiter.owner is not connection]
            for waiter in own:
                connection.deliveries.deliver(waiter, self._pack_gathered(waiter.values))

    def _deliver_on(self) -> None:
        self._is_delivering = False
        self.deliver_woken()

    def _pack_gathered(self, values: list[bytes] | None) -> bytes:
        """Encode the values of a gather once, for all ranks."""
        if values is None:
            return b""
        if values is not self._gathered[0]:
            self._gathered = (values, p.pack_strings(values))
        return self._gathered[1]

    def watch(self, connection: Peer, tag: int, keys: Iterable[bytes]) -> None:
        """Start a watch, which notifies a connection of every change to the given keys.

        Raises:
            ValueError: the connection has reached its limit on watched keys.
        """
        watched = set(keys)
        held = sum(map(len, connection.watches.values())) + len(watched)
        if held > self.limits.num_watched_keys:
            raise ValueError(
                f"the connection cannot watch more than {self.limits.num_watched_keys} keys"
            )
        connection.watches[tag] = watched
        for key in watched:
            self._watchers.setdefault(key, {})[connection, tag] = None
            self.state.watched.add(key)

    def unwatch(self, connection: Peer, tag: int) -> None:
        """End a watch."""
        for key in connection.watches.pop(tag, ()):
            watchers = self._watchers[key]
            watchers.pop((connection, tag), None)
            if not watchers:
                del self._watchers[key]
                self.state.watched.discard(key)

    def _push_change(self, key: bytes, value: bytes | None) -> None:
        event = bytes((value is not None,)) + p.pack_strings((key, value or b""))
        for connection, tag in list(self._watchers.get(key, ())):
            connection.deliveries.push_event(tag, event)

    # Admission of torch's clients.

    def look_up(self, connection: Peer) -> None:
        """Determine whether to admit a client without a secret, and pass the result to `settle`."""
        ends = connection.address
        if ends is None:  # it was reset before it was accepted
            self.loop.call_soon(connection.settle, False)
            return
        address = plain_address(ends[0])
        if address in self.admitted_addresses:
            self.loop.call_soon(connection.settle, True)
        elif not trust.is_loopback(address) and address != plain_address(ends[2]):
            self.loop.call_soon(connection.settle, False)
        else:
            self._asked[connection] = ends
            if self._asking is None:
                self._asking = self.loop.create_task(self._ask_kernel())

    async def _ask_kernel(self) -> None:
        """Look up, in the kernel's socket tables, the users that own the pending local peers."""
        try:
            while self._asked:
                asked, self._asked = self._asked, {}
                uids = await self.loop.run_in_executor(None, owner_uids, list(asked.values()))
                own = trust.own_uid()
                for connection, ends in asked.items():
                    connection.settle(own is not None and uids.get(ends) == own)
        finally:
            self._asking = None

    # Housekeeping.

    def _sweep(self) -> None:
        """Disconnect peers that exceeded a time limit, and end expired presences.

        An item that was already reserved at the previous call, and still is, is offered to the next
        waiter.
        """
        self._sweeper = self.loop.call_later(self._sweep_s, self._sweep)
        now = self.loop.time()
        self._log_unlogged()
        for connection in list(self.connections):
            waited = now - connection.since
            if connection.standing is not Standing.MEMBER:
                if waited > self.limits.handshake_s:
                    connection.refuse(
                        f"the client sent no handshake within {self.limits.handshake_s:g} s"
                    )
            elif connection.is_inside_command and not connection.is_deaf:
                windows = 1 + connection.partial_bytes // _PROGRESS_BYTES
                if waited > self.limits.command_s * windows:
                    connection.refuse(f"a command is still incomplete after {waited:.0f} s")
        for owner, key in self._old_promises.items():
            if self.state.promised_to.get(owner) == key:
                self.state.release_promise(owner)
        self._old_promises = dict(self.state.promised_to)
        self.leases.expire()
        if self.state.woken:
            self.deliver_woken()

    def statistics(self) -> Generator[None, None, StoreStatistics]:
        """Collect the server's statistics, yielding after each time slice."""
        state = self.state
        value_bytes = yield from total_bytes(state)
        return StoreStatistics(
            num_keys=len(state.values),
            num_queues=len(state.queues),
            num_connections=len(self.connections),
            num_waiters=state.num_waiters(),
            num_watched_keys=len(state.watched),
            num_presences=state.num_presences(),
            num_refused=self.num_refused,
            value_bytes=value_bytes,
            waiting=state.waiting_keys(),
            missing_ranks={
                show_key(key): tuple(round_.missing_ranks(_SHOWN_RANKS))
                for key, round_ in state.rounds.items()
            },
        )
