"""Implement the Store API for echelon's server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from echelon.errors import StoreConnectionError, StoreError, StoreProtocolError
from echelon.store.base import Store
from echelon.store.client.link import Call, Link
from echelon.store.client.session import CANCEL_S, Session, WaitCancelledError, show
from echelon.store.deadline import Deadline
from echelon.store.pipeline import Step
from echelon.store.presence import Presence
from echelon.store.watch import Change, Watch
from echelon.store.wire import protocol as p
from echelon.store.wire.statistics import StoreStatistics

_WINDOW_BYTES: Final = 32 << 10  # of a pipeline under way: fits a socket's buffers
_BEATS: Final = 4  # in one lease
_HICCUP_S: Final = 0.05  # before a connection that broke is replaced
_STEPS: Final = {
    "set": p.ACK_SET,
    "get": p.GET_IF,
    "add": p.ACK_ADD,
    "append": p.ACK_APPEND,
    "check": p.CHECK_EACH,
    "compare_set": p.ACK_COMPARE_SET,
    "delete_key": p.ACK_DELETE,
    "queue_push": p.ACK_PUSH,
    "queue_len": p.ACK_QUEUE_LEN,
}


def _body(*fields: bytes | int | list[bytes]) -> bytes:
    """Encode the fields of a query."""
    return p.encode(0xFF, *fields)[1:]


def _wires(keys: list[bytes]) -> list[bytes]:
    return [b"/" + key for key in keys]


class OurCalls(Store):
    """A client's primitive operations, implemented for echelon's server."""

    def __init__(self, session: Session, timeout_s: Callable[[], float]) -> None:
        self._session = session
        self._default_s = timeout_s
        self._leases = _Leases(session)

    def clone(self) -> Store:
        """Raise NotImplementedError, because only `TCPStore` can be cloned."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        """The server's address as "host:port"."""
        return self._session.dialer.endpoint

    def close(self) -> None:
        """End all presences and close the link."""
        self._leases.close()
        self._session.close()

    def _ask(
        self, operation: str, key: bytes, query: int, body: bytes, *, can_repeat: bool = False
    ) -> bytes | None:
        deadline = Deadline(self._default_s())
        return self._session.ask(operation, key, query, body, deadline, can_repeat=can_repeat)

    def _sure(
        self, operation: str, key: bytes, query: int, body: bytes, *, can_repeat: bool = False
    ) -> bytes:
        payload = self._ask(operation, key, query, body, can_repeat=can_repeat)
        if payload is None:
            raise StoreProtocolError(
                f"{operation} on {self.endpoint}: the server's reply does not contain a value"
            )
        return payload

    def _write(self, operation: str, key: bytes, query: int, body: bytes) -> None:
        self._session.write(operation, key, query, body, Deadline(self._default_s()))

    # Keys.

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._write("set", key, p.ACK_SET, _body(b"/" + key, value))

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        self._sure("set_confirmed", key, p.ACK_SET, _body(b"/" + key, value))

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        body = p.pack_string(b"/" + key)
        try:
            return self._session.wait("get", key, p.AWAIT_GET, body, deadline, can_repeat=True)
        except WaitCancelledError:
            self._raise_wait_timeout("get", [key], [key], deadline)

    def _do_look(self, key: bytes) -> bytes | None:
        return self._ask("get", key, p.GET_IF, p.pack_string(b"/" + key), can_repeat=True)

    def _do_add(self, key: bytes, amount: int) -> int:
        return self.add_wire(b"/" + key, amount, key)

    def add_wire(self, wire: bytes, amount: int, key: bytes) -> int:
        """Add to the counter whose encoded key is `wire`; `key` is the name used in errors."""
        return p.unpack_i64(self._sure("add", key, p.ACK_ADD, _body(wire, amount)))

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._write("append", key, p.ACK_APPEND, _body(b"/" + key, value))

    def _do_check(self, keys: list[bytes]) -> bool:
        return not keys or all(self._check_each("check", keys))

    def _check_each(self, operation: str, keys: list[bytes]) -> bytes:
        return self._sure(operation, keys[0], p.CHECK_EACH, _body(_wires(keys)), can_repeat=True)

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        body = _body(b"/" + key, expected, desired)
        return self._sure("compare_set", key, p.ACK_COMPARE_SET, body)

    def _do_delete(self, key: bytes) -> bool:
        answer = self._sure("delete_key", key, p.ACK_DELETE, p.pack_string(b"/" + key))
        return bool(p.unpack_i64(answer))

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        self._wait_for("wait", p.AWAIT, keys, deadline)

    def _wait_for(self, operation: str, query: int, keys: list[bytes], deadline: Deadline) -> bytes:
        body = _body(_wires(keys))
        try:
            return self._session.wait(operation, keys[0], query, body, deadline, can_repeat=True)
        except WaitCancelledError:
            there = self._check_each(operation, keys)
            missing = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            self._raise_wait_timeout(operation, keys, missing, deadline)

    def _do_num_keys(self) -> int:
        return p.unpack_i64(self._sure("num_keys", b"", p.ACK_NUM_KEYS, b"", can_repeat=True))

    def _do_list_keys(self) -> list[bytes]:
        wires = self._sure("list_keys", b"", p.ACK_LIST_KEYS, b"", can_repeat=True)
        return [wire[1:] for wire in p.unpack_strings(wires) if wire.startswith(b"/")]

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        return p.unpack_strings(self._wait_for("multi_get", p.AWAIT_MULTI_GET, keys, deadline))

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        pairs = [piece for pair in zip(_wires(keys), values, strict=True) for piece in pair]
        body = p.encode(p.MULTI_SET, pairs)[1:]
        self._write("multi_set", keys[0], p.ACK_MULTI_SET, body)

    # Queues.

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._write("queue_push", key, p.ACK_PUSH, _body(b"/" + key, value))

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        return self._ask("queue_pop", key, p.POP_IF, p.pack_string(b"/" + key))

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        try:
            body = p.pack_string(b"/" + key)
            return self._session.wait("queue_pop", key, p.AWAIT_POP, body, deadline)
        except WaitCancelledError:
            self._raise_wait_timeout("queue_pop", [key], [key], deadline)

    def _do_queue_len(self, key: bytes) -> int:
        body = p.pack_string(b"/" + key)
        answer = self._sure("queue_len", key, p.ACK_QUEUE_LEN, body, can_repeat=True)
        return p.unpack_i64(answer)

    # Rounds.

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        body = _body(b"/" + key, -1 if rank is None else rank, world_size)
        self._meet("barrier", key, p.ARRIVE, body, world_size, deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        body = _body(b"/" + key, rank, world_size, value)
        return p.unpack_strings(self._meet("gather", key, p.GATHER, body, world_size, deadline))

    def _meet(
        self,
        operation: str,
        key: bytes,
        query: int,
        body: bytes,
        world_size: int,
        deadline: Deadline,
    ) -> bytes:
        try:
            return self._session.wait(operation, key, query, body, deadline)
        except WaitCancelledError as cancelled:
            _, arrived, *missing = p.unpack_integers(cancelled.payload)
            self._raise_round_timeout(operation, key, world_size, arrived, missing, deadline)

    # Beyond torch's API.

    def statistics(self) -> StoreStatistics:
        """Return the server's statistics."""
        return StoreStatistics.from_json(self._sure("statistics", b"", p.STATISTICS, b""))

    def _do_pipeline(self, steps: list[Step]) -> None:
        """Send pipeline steps in batches that fit in the socket buffers, to avoid a deadlock."""
        while steps:
            queries: list[tuple[int, bytes]] = []
            size = 0
            while len(queries) < len(steps) and (not queries or size < _WINDOW_BYTES):
                step = steps[len(queries)]
                wire: bytes | list[bytes] = b"/" + step.key
                if step.operation == "check":
                    wire = [b"/" + step.key]
                body = _body(wire, *step.operands)
                queries.append((_STEPS[step.operation], body))
                size += len(body)
            deadline = Deadline(self._default_s())
            answers = self._session.ask_all("pipeline", steps[0].key, queries, deadline)
            for step, answer in zip(steps, answers, strict=False):
                step.reply.settle(self._outcome(step, *answer))
            steps = steps[len(queries) :]

    def _outcome(self, step: Step, status: int, payload: bytes) -> object:
        """Return the result of a pipeline step, or the error if the step failed."""
        if status == p.ERROR:
            text = payload.decode("utf-8", "replace")
            name = show(step.key)
            return StoreError(
                f"{step.operation}({name!r}) on {self.endpoint}: {text}",
                key=name,
                endpoint=self.endpoint,
            )
        if step.operation in ("add", "queue_len"):
            return p.unpack_i64(payload)
        if step.operation == "delete_key":
            return bool(p.unpack_i64(payload))
        if step.operation == "check":
            return payload == b"\x01"
        if step.operation == "get":
            return payload if status == p.OK else None
        return payload if step.operation == "compare_set" else None

    def _do_watch(self, keys: list[bytes]) -> Watch:
        deadline = Deadline(self._default_s())
        link = self._session.link("watch", keys[0], deadline)
        watching = None
        try:
            watching = link.start(p.WATCH, _body(_wires(keys)), deadline, is_watch=True)
            link.finish(watching, deadline)
        except OSError as error:
            if watching is not None:
                link.forget(watching)
            raise StoreConnectionError(f"watch on {self.endpoint}: {error}") from None
        assert watching.frames is not None
        status, payload = watching.frames.popleft()
        if status != p.OK:
            link.forget(watching)
            raise StoreError(f"watch on {self.endpoint}: {payload.decode('utf-8', 'replace')}")
        return _PushedWatch(link, watching)

    def _do_presence(self, key: bytes, value: bytes, lease_s: float) -> Presence:
        body = _body(b"/" + key, value, max(1, round(lease_s * 1000)))
        self._sure("presence", key, p.PRESENCE, body, can_repeat=True)
        self._leases.add(key, lease_s)
        return Presence(lambda: self._leases.release(key))


class _PushedWatch(Watch):
    """A watch that receives changes from echelon's server."""

    def __init__(self, link: Link, watching: Call) -> None:
        self._link = link
        self._watching: Call | None = watching

    def close(self) -> None:
        """Stop watching the keys."""
        watching, self._watching = self._watching, None
        if watching is not None:
            self._link.forget(watching)
            with contextlib.suppress(OSError):  # the connection is gone, and the watch with it
                self._link.cancel(watching, Deadline(CANCEL_S))

    def _next(self, deadline: Deadline) -> Change | None:
        watching = self._watching
        if watching is None or watching.frames is None:
            raise StoreConnectionError("the watch was closed")
        try:
            self._link.finish(watching, deadline)
        except TimeoutError:
            return None
        except (OSError, ValueError) as error:
            raise StoreConnectionError(f"watch: the connection broke ({error})") from None
        status, payload = watching.frames.popleft()
        if status == p.ERROR:
            self._watching = None
            raise StoreConnectionError(f"watch: {payload.decode('utf-8', 'replace')}")
        if status != p.EVENT or not payload:
            raise StoreProtocolError(
                f"watch: the server sent an unexpected frame with status {status}"
            )
        wire, value = p.unpack_strings(payload, 1)
        return Change(wire[1:].decode("utf-8", "surrogateescape"), value if payload[0] else None)


class _Leases:
    """The presences of one client. A background thread renews their leases."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._lease_s: dict[bytes, float] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, key: bytes, lease_s: float) -> None:
        """Renew a key's lease periodically until the presence is released."""
        with self._lock:
            self._lease_s[key] = lease_s
            if self._thread is None:
                self._changed.clear()
                self._thread = threading.Thread(
                    target=self._renew, name="echelon-lease", daemon=True
                )
                self._thread.start()

    def release(self, key: bytes) -> None:
        """End a presence. If the server cannot be reached, the lease expires on its own."""
        with self._lock:
            known = self._lease_s.pop(key, None)
        if known is not None and self._session.dialer.is_in_its_process:
            self._end([key])

    def close(self) -> None:
        """End all presences of this session."""
        if not self._session.dialer.is_in_its_process:
            return
        with self._lock:
            keys, self._lease_s = list(self._lease_s), {}
            self._is_closed = True
        self._changed.set()
        self._end(keys)

    def _end(self, keys: list[bytes]) -> None:
        for key in keys:
            deadline = Deadline(CANCEL_S)
            try:
                body = p.pack_string(b"/" + key)
                self._session.ask("presence", key, p.RELEASE, body, deadline)
            except StoreError:
                return

    def _renew(self) -> None:
        """Renew the leases until no presences remain."""
        while True:
            with self._lock:
                if not self._lease_s or self._is_closed:
                    self._thread = None
                    return
                pause_s = min(self._lease_s.values()) / _BEATS
            try:
                deadline = Deadline(pause_s)
                self._session.ask("presence", b"", p.BEAT, b"", deadline, can_repeat=True)
                link = self._session.link("presence", b"", deadline)
                if link.channel.wait_for_end(max(0.01, deadline.left_s)):
                    self._changed.wait(_HICCUP_S)
            except (StoreError, OSError, ValueError):
                if self._session.dialer.is_closed:
                    return
                self._changed.wait(_HICCUP_S)
