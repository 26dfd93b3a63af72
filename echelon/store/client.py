"""The client: torch's Store API over a connection to our server or torch's.

Blocking, safe from several threads, each call bounded by a deadline. A get of a key that is there
takes one round trip (CHECK and GET in one packet); only when it is missing does the call wait,
on a connection of its own (see the note in `connections`). On our server gather, barrier, get and
queue_pop wait inside the server; on torch's they are built of plain commands.

What may be repeated after a broken connection without harm (reading, waiting) is repeated; what
may not (add, append, compare_set, queue operations, rounds) fails, and says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store import protocol as p
from echelon.store import trust
from echelon.store.answers import (
    CANCEL_S,
    STEPS,
    Read,
    take_check,
    take_if_present,
    take_item,
    take_pong,
    take_wait,
)
from echelon.store.base import DEFAULT_TIMEOUT_S, Observer, Store
from echelon.store.channel import Channel
from echelon.store.connections import Connections
from echelon.store.deadline import Deadline, Timeout, seconds
from echelon.store.environment import job_observer, job_secret
from echelon.store.exchanges import Exchanges, show
from echelon.store.hosting import Hosted, host
from echelon.store.pipeline import Step
from echelon.store.presence import Presence
from echelon.store.statistics import StoreStatistics
from echelon.store.watch import PushedWatch, Watch

T = TypeVar("T")

_INIT_KEY: Final = b"init/"
_CHECK_ONE: Final = bytes((p.CHECK,)) + p.pack_u64(1)
_WINDOW_BYTES: Final = 32 << 10  # of a pipeline under way: fits a socket's buffers
_GET: Final = bytes((p.GET,))
_SET: Final = bytes((p.SET,))


def _wire(key: bytes) -> bytes:
    return b"/" + key


def _wires(keys: list[bytes]) -> list[bytes]:
    return [b"/" + key for key in keys]


class TCPStore(Store):
    """Join the store server at an address, or host it.

    Args:
        host_name, port: the server; the master binds them, and port 0 is any free one.
        world_size: how many clients to expect; None if that is not known.
        is_master: host the server in this process as well.
        timeout: how long connecting may take, and each call that names no timeout of its own.
        wait_for_workers: have the master wait in here until `world_size` clients have joined.
        multi_tenant: let several masters of this process share one server at the port.
        master_listen_fd: descriptor of a listening socket for the master to take over.
        use_libuv: accepted for torch's sake; there is one server.
        observer: see `Store.observer`; in a job's worker the black box, unless one is given.
        secret: what clients and server must both know, at least 16 bytes. None: the job's, if this
            is the store of the job whose worker this process is, else an open store.

    Raises:
        StoreTimeoutError: no server came up, or not all workers joined, within the timeout.
        StoreError: the master's address cannot be bound.
        StoreConnectionError: the server is there and will not have us.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,  # noqa: ARG002 - torch's signature
        *,
        observer: Observer | None = None,
        secret: str | bytes | None = None,
    ) -> None:
        self._timeout_s = seconds(timeout)
        self._observer = job_observer() if observer is None else observer
        self._secret = trust.secret_bytes(job_secret(host_name, port) if secret is None else secret)
        self._hosted: Hosted | None = None
        deadline = Deadline(self._timeout_s)
        if is_master:
            self._hosted = host(host_name, port, self._secret, multi_tenant, master_listen_fd)
            port = self._hosted.port
        self._connections = Connections(host_name, port, self._secret)
        self._exchanges = Exchanges(self._connections)
        try:
            self._connections.open(deadline)
            if world_size is not None and wait_for_workers:
                self._join(world_size, is_master, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The server's name or address, as given."""
        return self._connections.host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._connections.port

    @property
    def endpoint(self) -> str:
        """The server as "host:port"."""
        return self._connections.endpoint

    @property
    def has_extensions(self) -> bool:
        """Whether the server is ours, so that gather and the like cost one round trip."""
        return self._connections.is_ours

    def clone(self, timeout: Timeout | None = None) -> TCPStore:
        """Return another client of the same server.

        Args:
            timeout: limit of connecting, and of calls that name none; None: as this client's.
        """
        return TCPStore(
            self.host,
            self.port,
            timeout=self._timeout_s if timeout is None else timeout,
            observer=self._observer,
            secret=self._secret,
        )

    def close(self) -> None:
        """Leave the server; if this store hosts it, stop it once nobody here shares it."""
        hosted = self._leave()
        if hosted is not None:
            hosted.leave()

    def _leave(self) -> Hosted | None:
        """Close the connections; return the server if this process's store hosts one."""
        connections = getattr(self, "_connections", None)
        if connections is not None:
            connections.close()
        hosted, self._hosted = getattr(self, "_hosted", None), None
        return hosted if hosted is not None and hosted.pid == os.getpid() else None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # interpreter shutdown: what is gone is gone
            hosted = self._leave()
            if hosted is not None:
                hosted.leave_soon()  # a finalizer waits for no thread

    def _join(self, world_size: int, is_master: bool, deadline: Deadline) -> None:
        """Count this client in; the master waits until all are."""
        joined = self._add(_INIT_KEY, 1, "init/")
        pause = threading.Event()
        while is_master and joined < world_size:
            if deadline.left_s <= 0:
                raise StoreTimeoutError(
                    f"TCPStore on {self.endpoint} after {deadline.timeout_s:.1f} s: "
                    f"{joined} of {world_size} workers joined. See the output of those that did "
                    f"not, and whether they dial this address",
                    endpoint=self.endpoint,
                )
            pause.wait(0.005)
            joined = self._add(_INIT_KEY, 0, "init/")

    # Exchanges.

    def _ask(
        self,
        operation: str,
        key: bytes,
        request: bytes,
        read: Callable[[Channel, Deadline], T],
        deadline: Deadline | None = None,
        *,
        can_repeat: bool = False,
    ) -> T:
        deadline = deadline or Deadline(self._timeout_s)
        return self._exchanges.ask(operation, key, request, read, deadline, can_repeat=can_repeat)

    def _tell(self, operation: str, key: bytes, request: bytes) -> None:
        self._exchanges.tell(operation, key, request, Deadline(self._timeout_s))

    def _framed(
        self, operation: str, key: bytes, world_size: int = 0
    ) -> Callable[[Channel, Deadline], bytes]:
        """Return an exchange for a waiting query of ours: one frame, or a cancel."""

        def exchange(channel: Channel, deadline: Deadline) -> bytes:
            try:
                status, payload = channel.take_frame(deadline)
            except TimeoutError:
                grace = Deadline(CANCEL_S)
                channel.send(p.encode(p.CANCEL), grace)
                status, payload = channel.take_frame(grace)
                if status != p.CANCELLED:
                    channel.take_frame(grace)  # came after all; the cancel found nothing
            if status == p.CANCELLED:
                if not world_size:
                    self._raise_wait_timeout(operation, [key], [key], deadline)
                _, came, *missing = p.unpack_integers(payload)
                self._raise_round_timeout(operation, key, world_size, came, missing, deadline)
            return self._checked(operation, key, status, payload)

        return exchange

    def _checked(self, operation: str, key: bytes, status: int, payload: bytes) -> bytes:
        """Return the payload of a frame, or raise what it says."""
        if status == p.OK:
            return payload
        raise StoreError(
            f"{operation}({show(key)!r}) on {self.endpoint}: {payload.decode('utf-8', 'replace')}",
            key=show(key),
            endpoint=self.endpoint,
        )

    def _ask_framed(self, operation: str, key: bytes, request: bytes) -> bytes:
        """Send one of our queries that is answered at once."""
        status, payload = self._ask(operation, key, request, Channel.take_frame)
        return self._checked(operation, key, status, payload)

    # Keys.

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._tell("set", key, _SET + p.pack_string(_wire(key)) + p.pack_string(value))

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        string = p.pack_string(_wire(key))
        request = _CHECK_ONE + string + _GET + string
        while True:
            value = self._ask("get", key, request, take_if_present, deadline, can_repeat=True)
            if value is not None:
                return value
            if self.has_extensions:
                waiting = p.encode(p.AWAIT_GET, _wire(key))
                exchange = self._framed("get", key)
                return self._exchanges.hold(
                    "get", key, waiting, exchange, deadline, can_repeat=True
                )
            self._wait_present("get", [key], deadline)

    def _do_add(self, key: bytes, amount: int) -> int:
        return self._add(_wire(key), amount, show(key))

    def _add(self, wire: bytes, amount: int, name: str) -> int:
        key = name.encode("utf-8", "replace")
        if self.has_extensions:
            return p.unpack_i64(self._ask_framed("add", key, p.encode(p.ACK_ADD, wire, amount)))
        return self._ask("add", key, p.encode(p.ADD, wire, amount), Channel.take_int)

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._tell("append", key, p.encode(p.APPEND, _wire(key), value))

    def _do_check(self, keys: list[bytes]) -> bool:
        if not keys:
            return True
        request = p.encode(p.CHECK, _wires(keys))
        return self._ask("check", keys[0], request, take_check, can_repeat=True)

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        request = p.encode(p.COMPARE_SET, _wire(key), expected, desired)
        return self._ask("compare_set", key, request, Channel.take_string)

    def _do_delete(self, key: bytes) -> bool:
        request = p.encode(p.DELETE_KEY, _wire(key))
        return bool(self._ask("delete_key", key, request, Channel.take_int))

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        request = p.encode(p.CHECK, _wires(keys))
        if not self._ask("wait", keys[0], request, take_check, deadline, can_repeat=True):
            self._wait_present("wait", keys, deadline)

    def _wait_present(self, operation: str, keys: list[bytes], deadline: Deadline) -> None:
        """Wait inside the server until all keys are there."""
        request = p.encode(p.WAIT, _wires(keys))
        is_there = self._exchanges.hold(
            operation, keys[0], request, take_wait, deadline, can_repeat=True
        )
        if not is_there:
            self._raise_wait_timeout(operation, keys, self._missing_of(keys), deadline)

    def _missing_of(self, keys: list[bytes]) -> list[bytes]:
        """Return which of the keys are not there, in one round trip."""
        request = b"".join(p.encode(p.CHECK, [_wire(key)]) for key in keys)

        def read(channel: Channel, deadline: Deadline) -> list[bytes]:
            answers = channel.take(len(keys), deadline)
            return [key for key, there in zip(keys, answers, strict=True) if there]

        return self._ask("check", keys[0], request, read, can_repeat=True)

    def _do_num_keys(self) -> int:
        return self._ask("num_keys", b"", p.encode(p.NUM_KEYS), Channel.take_int, can_repeat=True)

    def _do_list_keys(self) -> list[bytes]:
        def read(channel: Channel, deadline: Deadline) -> list[bytes]:
            count = channel.take_int(deadline)
            return [channel.take_string(deadline) for _ in range(count)]

        wires = self._ask("list_keys", b"", p.encode(p.LIST_KEYS), read, can_repeat=True)
        return [wire[1:] for wire in wires if wire.startswith(b"/")]

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        wires = _wires(keys)
        request = p.encode(p.CHECK, wires) + p.encode(p.MULTI_GET, wires)

        def read(channel: Channel, deadline: Deadline) -> list[bytes] | None:
            is_there = take_check(channel, deadline)
            values = [channel.take_string(deadline) for _ in keys]
            return values if is_there else None

        while True:
            values = self._ask("multi_get", keys[0], request, read, deadline, can_repeat=True)
            if values is not None:
                return values
            self._wait_present("multi_get", keys, deadline)

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        pairs = [piece for pair in zip(_wires(keys), values, strict=True) for piece in pair]
        self._tell("multi_set", keys[0], p.encode(p.MULTI_SET, pairs))

    # Queues.

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._tell("queue_push", key, p.encode(p.QUEUE_PUSH, _wire(key), value))

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        return self._ask("queue_pop", key, p.encode(p.QUEUE_POP, _wire(key)), take_item)

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        if self.has_extensions:
            waiting = p.encode(p.AWAIT_POP, _wire(key))
            return self._exchanges.hold(
                "queue_pop", key, waiting, self._framed("queue_pop", key), deadline
            )
        while True:
            self._wait_present("queue_pop", [key], deadline)
            item = self._do_queue_pop(key)
            if item is not None:
                return item

    def _do_queue_len(self, key: bytes) -> int:
        request = p.encode(p.QUEUE_LEN, _wire(key))
        return self._ask("queue_len", key, request, Channel.take_int, can_repeat=True)

    # Beyond torch's API.

    def statistics(self) -> StoreStatistics:
        """Return what our server holds and who waits for what.

        Raises:
            StoreError: the server is torch's, which keeps none.
        """
        self._demand_extensions("statistics")
        payload = self._ask_framed("statistics", b"", p.encode(p.STATISTICS))
        return StoreStatistics.from_json(payload)

    def _demand_extensions(self, operation: str) -> None:
        if not self.has_extensions:
            raise StoreError(
                f"{operation} on {self.endpoint}: needs echelon's server, this one is torch's",
                endpoint=self.endpoint,
            )

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        if self.has_extensions:
            self._ask_framed("set_confirmed", key, p.encode(p.ACK_SET, _wire(key), value))
            return
        request = p.encode(p.SET, _wire(key), value) + p.encode(p.PING, 0)
        self._ask("set_confirmed", key, request, take_pong)

    def _do_pipeline(self, steps: list[Step]) -> None:
        """Send in windows that fit the sockets' buffers, so that neither side waits for itself."""
        while steps:
            window: list[tuple[Step, Read]] = []
            request: list[bytes] = []
            size = 0
            while len(window) < len(steps) and (not window or size < _WINDOW_BYTES):
                step = steps[len(window)]
                command, read = self._encode_step(step)
                window.append((step, read))
                request.append(command)
                size += len(command)
            self._send_window(window, b"".join(request))
            steps = steps[len(window) :]

    def _send_window(self, window: list[tuple[Step, Read]], request: bytes) -> None:
        def read_all(channel: Channel, deadline: Deadline) -> list[object]:
            answers = [read(channel, deadline) for _, read in window]
            take_pong(channel, deadline)
            return answers

        first = window[0][0].key
        answers = self._ask("pipeline", first, request + p.encode(p.PING, 0), read_all)
        for (step, _), answer in zip(window, answers, strict=True):
            step.reply.settle(answer)

    def _encode_step(self, step: Step) -> tuple[bytes, Read]:
        """Return the command of a pipeline's step and the reader of its answer."""
        wire = _wire(step.key)
        if step.operation == "get":
            return p.encode(p.CHECK, [wire]) + p.encode(p.GET, wire), take_if_present
        if step.operation == "check":
            return p.encode(p.CHECK, [wire]), take_check
        if step.operation == "add" and self.has_extensions:

            def read_sum(channel: Channel, deadline: Deadline) -> object:
                status, payload = channel.take_frame(deadline)
                try:
                    return p.unpack_i64(self._checked("add", step.key, status, payload))
                except StoreError as error:
                    return error

            return p.encode(p.ACK_ADD, wire, *step.operands), read_sum
        query, read = STEPS[step.operation]
        return p.encode(query, wire, *step.operands), read

    def _do_watch(self, keys: list[bytes]) -> Watch:
        if not self.has_extensions:
            return super()._do_watch(keys)
        self._confirm_writes()
        channel = self._dedicate("watch", keys[0], p.encode(p.WATCH, _wires(keys)))
        return PushedWatch(channel, lambda wire: show(wire[1:]))

    def _do_presence(self, key: bytes, value: bytes) -> Presence:
        if not self.has_extensions:
            return super()._do_presence(key, value)
        self._confirm_writes()
        channel = self._dedicate("presence", key, p.encode(p.PRESENCE, _wire(key), value))

        def take_back() -> None:
            with contextlib.suppress(OSError):  # the server is gone, and the key with it
                channel.leave(Deadline(CANCEL_S))
            channel.close()

        return Presence(take_back)

    def _confirm_writes(self) -> None:
        """Make sure that what this client has set has arrived."""
        self._ask("ping", b"", p.encode(p.PING, 0), take_pong)

    def _dedicate(self, operation: str, key: bytes, request: bytes) -> Channel:
        """Open a connection for one purpose and start it with one of our queries."""
        deadline = Deadline(self._timeout_s)
        channel = self._connections.dedicated(operation, show(key), deadline)
        try:
            channel.send(request, deadline)
            self._checked(operation, key, *channel.take_frame(deadline))
        except TimeoutError as error:
            channel.close()
            raise self._connections.timed_out(operation, show(key), deadline, str(error)) from None
        except OSError as error:
            raise self._connections.lost(operation, show(key), channel, error) from None
        return channel

    # Rounds.

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        if self.has_extensions:
            arrival = p.encode(p.ARRIVE, _wire(key), -1 if rank is None else rank, world_size)
            exchange = self._framed("barrier", key, world_size)
            self._exchanges.hold("barrier", key, arrival, exchange, deadline)
        elif rank is not None:
            super()._do_barrier(key, rank, world_size, deadline)
        elif not self._exchanges.hold(
            "barrier", key, p.encode(p.BARRIER, _wire(key), world_size), take_wait, deadline
        ):
            self._raise_round_timeout("barrier", key, world_size, 1, (), deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        if not self.has_extensions:
            return super()._do_gather(key, rank, world_size, value, deadline)
        arrival = p.encode(p.GATHER, _wire(key), rank, world_size, value)
        exchange = self._framed("gather", key, world_size)
        return p.unpack_strings(self._exchanges.hold("gather", key, arrival, exchange, deadline))
