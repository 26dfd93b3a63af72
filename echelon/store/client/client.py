"""Implement torch's Store API over a connection to echelon's server or to torch's.

All calls block, are thread-safe and have a deadline. The handshake determines whether the server is
echelon's or torch's. `our_calls` implements the calls for echelon's server, and `torch_calls` the
calls for torch's server. With echelon's server, every call takes one round trip.

If the connection breaks, reads and waits are retried. All other calls, such as add, append,
compare_set, queue operations, barriers and gathers, fail with an error that reports the broken
connection.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store.base import DEFAULT_TIMEOUT_S, Observer, Store
from echelon.store.client.channel import Place
from echelon.store.client.dialer import Dialer
from echelon.store.client.hosting import Hosted, host
from echelon.store.client.our_calls import OurCalls
from echelon.store.client.pool import Pool
from echelon.store.client.session import Session
from echelon.store.client.torch_calls import TorchCalls
from echelon.store.deadline import Deadline, Timeout, seconds
from echelon.store.environment import job_observer, job_secret
from echelon.store.pipeline import Step
from echelon.store.presence import Presence
from echelon.store.watch import Watch
from echelon.store.wire import trust
from echelon.store.wire.statistics import StoreStatistics

_INIT_WIRE: Final = b"init/"


class TCPStore(Store):
    """A client of a store server. The client can also host the server.

    Args:
        host_name: the server's host name or address.
        port: the server's port; for a master, 0 means any free port.
        world_size: the expected number of clients; None if unknown.
        is_master: whether to also host the server in this process.
        timeout: the timeout for connecting, and for each call that does not specify its own.
        wait_for_workers: whether the master's constructor waits until `world_size` clients have
            joined.
        multi_tenant: whether several masters in this process can share one server on one port.
        master_listen_fd: the descriptor of a listening socket for the master to take over.
        use_libuv: accepted for compatibility with torch; has no effect.
        observer: see `Store.observer`; by default, a job's worker records its waits in the black
            box.
        secret: the secret shared by clients and server, at least 16 bytes. If None, a worker uses
            the job's secret for the job's store, and no secret for other stores.

    Raises:
        ValueError: `port`, `timeout` or `secret` is invalid.
        StoreTimeoutError: no server could be reached, or not all workers joined, within the
            timeout.
        StoreError: the master's address cannot be bound.
        StoreConnectionError: the server was reached but does not accept this client.

    Example:
        >>> store = TCPStore("127.0.0.1", server.port, timeout=10)
        >>> store.set("ready", b"yes")
        >>> store.add("arrived", 2)
        2
        >>> store.multi_get(["ready", "arrived"])
        [b'yes', b'2']
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
        if not 0 <= port <= 65535 or (port == 0 and not is_master):
            raise ValueError(
                f"port {port}: a server's port must be from 1 to 65535; 0 requires is_master=True"
            )
        self._observer = job_observer() if observer is None else observer
        self._secret = trust.secret_bytes(job_secret(host_name, port) if secret is None else secret)
        self._hosted: Hosted | None = None
        self._calls: OurCalls | TorchCalls | None = None
        deadline = Deadline(self._timeout_s)
        if is_master:
            self._hosted = host(host_name, port, self._secret, multi_tenant, master_listen_fd)
            port = self._hosted.port
        self._dialer = Dialer(Place(host_name, port, self._secret))
        try:
            self._calls = self._connect(deadline)
            if world_size is not None and wait_for_workers:
                self._join(world_size, is_master, deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline: Deadline) -> OurCalls | TorchCalls:
        channel = self._dialer.connect("connect", "", deadline)
        if channel.is_ours:
            return OurCalls(Session(self._dialer, channel), lambda: self._timeout_s)
        return TorchCalls(Pool(self._dialer, channel), lambda: self._timeout_s)

    @property
    def host(self) -> str:
        """The server's host name or address, as passed by the caller."""
        return self._dialer.place.host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._dialer.place.port

    @property
    def endpoint(self) -> str:
        """The server's address as "host:port"."""
        return self._dialer.endpoint

    @property
    def has_extensions(self) -> bool:
        """True if the server is echelon's rather than torch's."""
        return isinstance(self._calls, OurCalls)

    def clone(self, timeout: Timeout | None = None) -> TCPStore:
        """Return another client of the same server.

        Args:
            timeout: the timeout for connecting, and for calls that do not specify their own; None
                means this client's timeout.
        """
        return TCPStore(
            self.host,
            self.port,
            timeout=self._timeout_s if timeout is None else timeout,
            observer=self._observer,
            secret=self._secret,
        )

    def close(self) -> None:
        """Disconnect. If this process hosts the server, the last store to disconnect stops it."""
        hosted = self._leave()
        if hosted is not None:
            hosted.leave()

    def _leave(self) -> Hosted | None:
        """Close the connections; return the hosted server, if any."""
        calls = getattr(self, "_calls", None)
        if calls is not None:
            calls.close()
        hosted, self._hosted = getattr(self, "_hosted", None), None
        return hosted if hosted is not None and hosted.pid == os.getpid() else None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # interpreter shutdown: what is gone is gone
            hosted = self._leave()
            if hosted is not None:
                hosted.leave_soon()  # a finalizer waits for no thread

    def _join(self, world_size: int, is_master: bool, deadline: Deadline) -> None:
        """Register this client; on the master, wait until all clients have joined."""
        joined = self._open_calls.add_wire(_INIT_WIRE, 1, _INIT_WIRE)
        pause = threading.Event()
        while is_master and joined < world_size:
            if deadline.left_s <= 0:
                raise StoreTimeoutError(
                    f"TCPStore on {self.endpoint} timed out after {deadline.timeout_s:.1f} s: "
                    f"{joined} of {world_size} workers joined. See the output of the missing "
                    "workers, and check that they connect to this address",
                    endpoint=self.endpoint,
                )
            pause.wait(0.005)
            joined = self._open_calls.add_wire(_INIT_WIRE, 0, _INIT_WIRE)

    @property
    def _open_calls(self) -> OurCalls | TorchCalls:
        assert self._calls is not None
        return self._calls

    def statistics(self) -> StoreStatistics:
        """Return statistics about echelon's server.

        Raises:
            StoreError: the server is torch's, which does not collect statistics.
        """
        if not isinstance(self._calls, OurCalls):
            raise StoreError(
                f"statistics on {self.endpoint}: the server is a torch TCPStore, "
                "which keeps no statistics",
                endpoint=self.endpoint,
            )
        return self._calls.statistics()

    # Primitives: those of whichever server it is.

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._open_calls._do_set(key, value)

    def _do_set_confirmed(self, key: bytes, value: bytes) -> None:
        self._open_calls._do_set_confirmed(key, value)

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        return self._open_calls._do_get(key, deadline)

    def _do_look(self, key: bytes) -> bytes | None:
        return self._open_calls._do_look(key)

    def _do_add(self, key: bytes, amount: int) -> int:
        return self._open_calls._do_add(key, amount)

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._open_calls._do_append(key, value)

    def _do_check(self, keys: list[bytes]) -> bool:
        return self._open_calls._do_check(keys)

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._open_calls._do_compare_set(key, expected, desired)

    def _do_delete(self, key: bytes) -> bool:
        return self._open_calls._do_delete(key)

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        self._open_calls._do_wait(keys, deadline)

    def _do_num_keys(self) -> int:
        return self._open_calls._do_num_keys()

    def _do_list_keys(self) -> list[bytes]:
        return self._open_calls._do_list_keys()

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        return self._open_calls._do_multi_get(keys, deadline)

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        self._open_calls._do_multi_set(keys, values)

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._open_calls._do_queue_push(key, value)

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        return self._open_calls._do_queue_pop(key)

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        return self._open_calls._do_queue_pop_wait(key, deadline)

    def _do_queue_len(self, key: bytes) -> int:
        return self._open_calls._do_queue_len(key)

    def _do_pipeline(self, steps: list[Step]) -> None:
        self._open_calls._do_pipeline(steps)

    def _do_watch(self, keys: list[bytes]) -> Watch:
        return self._open_calls._do_watch(keys)

    def _do_presence(self, key: bytes, value: bytes, lease_s: float) -> Presence:
        return self._open_calls._do_presence(key, value, lease_s)

    def _do_barrier(
        self, key: bytes, rank: int | None, world_size: int, deadline: Deadline
    ) -> None:
        self._open_calls._do_barrier(key, rank, world_size, deadline)

    def _do_gather(
        self, key: bytes, rank: int, world_size: int, value: bytes, deadline: Deadline
    ) -> list[bytes]:
        return self._open_calls._do_gather(key, rank, world_size, value, deadline)
