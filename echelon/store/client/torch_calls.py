"""Implement the Store API for torch's server.

Gathers are built from plain operations (see the note in `base`). If a connection breaks, reads and
waits are retried (see `Exchanges`). All other calls, such as add, append, compare_set, queue
operations, barriers and gathers, fail with an error that reports the broken connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from echelon.store.base import Store
from echelon.store.client.answers import (
    STEPS,
    Read,
    take_check,
    take_if_present,
    take_if_still_present,
    take_item,
    take_pong,
    take_wait,
)
from echelon.store.client.channel import Channel
from echelon.store.client.exchanges import Exchanges
from echelon.store.client.pool import Pool
from echelon.store.deadline import Deadline
from echelon.store.pipeline import Step
from echelon.store.wire import protocol as p

T = TypeVar("T")

_WINDOW_BYTES: Final = 32 << 10  # of a pipeline under way: fits a socket's buffers
_CHECK_ONE: Final = bytes((p.CHECK,)) + p.pack_u64(1)
_GET: Final = bytes((p.GET,))
_SET: Final = bytes((p.SET,))


def _wire(key: bytes) -> bytes:
    return b"/" + key


def _wires(keys: list[bytes]) -> list[bytes]:
    return [b"/" + key for key in keys]


class TorchCalls(Store):
    """A client's primitive operations, implemented for torch's server."""

    def __init__(self, pool: Pool, timeout_s: Callable[[], float]) -> None:
        self._pool = pool
        self._exchanges = Exchanges(pool)
        self._default_s = timeout_s

    def clone(self) -> Store:
        """Raise NotImplementedError, because only `TCPStore` can be cloned."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        """The server's address as "host:port"."""
        return self._pool.endpoint

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

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
        deadline = deadline or Deadline(self._default_s())
        return self._exchanges.ask(operation, key, request, read, deadline, can_repeat=can_repeat)

    def _tell(self, operation: str, key: bytes, request: bytes) -> None:
        self._exchanges.tell(operation, key, request, Deadline(self._default_s()))

    # Keys.

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._tell("set", key, _SET + p.pack_string(_wire(key)) + p.pack_string(value))

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        string = p.pack_string(_wire(key))
        check = _CHECK_ONE + string
        request = check + _GET + string + check
        while True:
            value = self._ask("get", key, request, take_if_still_present, deadline, can_repeat=True)
            if value is not None:
                return value
            self._wait_present("get", [key], deadline)

    def _do_add(self, key: bytes, amount: int) -> int:
        return self.add_wire(_wire(key), amount, key)

    def add_wire(self, wire: bytes, amount: int, key: bytes) -> int:
        """Add `amount` to the counter with the encoded key `wire`; errors name it as `key`."""
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
        """Ask the server to answer once all keys exist, and block until it answers."""
        request = p.encode(p.WAIT, _wires(keys))
        is_there = self._exchanges.hold(
            operation, keys[0], request, take_wait, deadline, can_repeat=True
        )
        if not is_there:
            self._raise_wait_timeout(operation, keys, self._missing_of(keys), deadline)

    def _missing_of(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys that do not exist, in one round trip."""
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
        while True:
            self._wait_present("queue_pop", [key], deadline)
            item = self._do_queue_pop(key)
            if item is not None:
                return item

    def _do_queue_len(self, key: bytes) -> int:
        request = p.encode(p.QUEUE_LEN, _wire(key))
        return self._ask("queue_len", key, request, Channel.take_int, can_repeat=True)

    # Beyond torch's API.

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        request = p.encode(p.SET, _wire(key), value) + p.encode(p.PING, 0)
        self._ask("set_confirmed", key, request, take_pong)

    def _do_pipeline(self, steps: list[Step]) -> None:
        """Send pipeline steps in batches that fit in the socket buffers, to avoid a deadlock."""
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
        """Return the command for a pipeline step, and the function that reads its answer."""
        wire = _wire(step.key)
        if step.operation == "get":
            return p.encode(p.CHECK, [wire]) + p.encode(p.GET, wire), take_if_present
        if step.operation == "check":
            return p.encode(p.CHECK, [wire]), take_check
        query, read = STEPS[step.operation]
        return p.encode(query, wire, *step.operands), read

    # Rounds.

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        if rank is not None:
            super()._do_barrier(key, rank, world_size, deadline)
        elif not self._exchanges.hold(
            "barrier", key, p.encode(p.BARRIER, _wire(key), world_size), take_wait, deadline
        ):
            self._raise_round_timeout("barrier", key, world_size, 1, (), deadline)
