"""Run the store's server on an event loop, in a separate thread or in the foreground.

The constructor of `StoreServer` binds and listens, so the port is known immediately. `start()` runs
the event loop on a daemon thread, and `serve_forever()` runs it on the calling thread. The loop is
uvloop's if uvloop is installed, else asyncio's.

[Note: the server in a training process] The event loop needs the GIL, so a server inside a busy
rank responds slowly. A job's own store should be hosted by the launcher or by `echelon store`. A
rank should host a store only in tests and small jobs.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.errors import StoreError, StoreTimeoutError
from echelon.host.tcp_table import plain_address
from echelon.store.forks import keep_from_children
from echelon.store.server.hub import Hub, log
from echelon.store.server.peer import Peer
from echelon.store.wire import trust
from echelon.store.wire.keepalive import keep_alive
from echelon.store.wire.limits import Limits
from echelon.store.wire.statistics import StoreStatistics

if TYPE_CHECKING:
    from typing_extensions import Self

_BACKLOG = 4096
_START_S = 30.0
_BIND_TRIES = 10
_CLOSE_S = 5.0
_WIND_DOWN_S = 0.02

T = TypeVar("T")


class StoreServer:
    """A store server at one address.

    Args:
        host: the local address or host name to bind. The constructor binds all addresses of a host
            name. "0.0.0.0" and "::" mean every interface.
        port: the port, or 0 for any free port. The attribute `port` contains the actual port.
        secret: the secret shared with echelon's clients. If None, the store is open to every client
            that can reach the address.
        limits: the limits for each peer.
        listen_fd: the descriptor of a listening socket, which the server takes over.
        bind_all_if_foreign: whether to bind every interface if `host` resolves only to addresses of
            other machines; requires a secret.

    Raises:
        StoreError: the address cannot be bound.

    `start`, `close` and `statistics` can be called from any thread.

    Example:
        >>> server = StoreServer("127.0.0.1").start()
        >>> client = TCPStore("127.0.0.1", server.port, timeout=10)
        >>> client.set("key", b"value")
        >>> client.close()
        >>> server.close()
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: str | bytes | None = None,
        limits: Limits | None = None,
        listen_fd: int | None = None,
        bind_all_if_foreign: bool = False,
    ) -> None:
        self.host = host
        self._secret = trust.secret_bytes(secret)
        self._limits = limits or Limits()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hub: Hub | None = None
        self._is_closed = False
        self._is_serving = False
        self._must_stop = False
        self._lock = threading.Lock()
        if listen_fd is not None:
            self._sockets = [socket.socket(fileno=listen_fd)]
            keep_alive(self._sockets[0])
        else:
            self._sockets = _bind(host, port, bind_all_if_foreign and self._secret is not None)
        self.port: int = self._sockets[0].getsockname()[1]
        keep_from_children(self)

    def descriptors(self) -> Iterator[int]:
        """Yield the file descriptors of the sockets that a forked child must not keep open."""
        yield from (listener.fileno() for listener in self._sockets)
        hub = self._hub
        if hub is not None:
            yield from (connection.descriptor for connection in hub.connections)

    @property
    def address(self) -> str:
        """The first numeric address that was bound."""
        return str(self._sockets[0].getsockname()[0])

    def start(self) -> Self:
        """Serve on a daemon thread; return once the server accepts connections."""
        with self._lock:
            assert self._thread is None, "start() was called before"
            started = threading.Event()
            self._prepare()
            self._thread = threading.Thread(
                target=self._run, args=(started.set,), name="echelon-store", daemon=True
            )
            self._thread.start()
        if not started.wait(_START_S):
            raise StoreTimeoutError(
                f"store server on {self._endpoint}: the event loop did not start within "
                f"{_START_S:.0f} s",
                endpoint=self._endpoint,
            )
        atexit.register(self.close)
        return self

    def serve_forever(self, *, on_ready: Callable[[], None] | None = None) -> None:
        """Serve on the calling thread until `close` or `stop_soon` is called.

        On the main thread, SIGTERM and SIGINT also stop the server, unless they are ignored.
        """
        with self._lock:
            assert self._thread is None, "start() was called before"
            _raise_descriptor_limit()  # the process serves and does nothing else
            self._prepare()
            self._thread = threading.current_thread()
        assert self._loop is not None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._loop.add_signal_handler(number, self.stop_soon)
        self._run(on_ready or (lambda: None))

    def stop_soon(self) -> None:
        """Stop the event loop immediately, or as soon as it starts. Thread-safe."""
        self._must_stop = True
        loop = self._loop
        if loop is not None and self._is_serving:  # else `_begin` looks at `_must_stop`
            with contextlib.suppress(RuntimeError):  # closed already
                loop.call_soon_threadsafe(loop.stop)

    def close(self) -> None:
        """Close every connection and free the port. Blocks for at most 5 s."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        if self._pid != os.getpid() or self._thread is None:
            for listener in self._sockets:  # after a fork the loop's thread is not ours
                listener.close()
            return
        self.stop_soon()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, address: str) -> None:
        """Admit torch's clients from a numeric IP address, even though they lack the secret.

        Use this method only for addresses of hosts that have authenticated themselves.
        """
        plain = plain_address(address)
        self._call(lambda hub: hub.admitted_addresses.add(plain))

    def publish(self, key: str, value: str) -> None:
        """Store a value under a key.

        Raises:
            StoreError: the server is not running.
        """
        wire = b"/" + key.encode()  # as clients send keys
        self._call(lambda hub: hub.publish(wire, value.encode()))

    def post(self, folder: str, value: str) -> None:
        """Store a value under the first of the keys FOLDER/0, FOLDER/1, ... that is free.

        Raises:
            StoreError: the server is not running.
        """
        wire = b"/" + folder.encode()
        self._call(lambda hub: hub.post(wire, value.encode()))

    def hold(self, keys: Sequence[str]) -> list[bool]:
        """For each of the keys, in order, return whether it exists.

        Raises:
            StoreError: the server is not running.
        """
        wire = [b"/" + key.encode() for key in keys]
        return self._call(lambda hub: [hub.state.is_present(key) for key in wire])

    def renew(self) -> None:
        """Disconnect all clients and drop all keys.

        Clients that connected before this call can no longer write to the store.

        Raises:
            StoreError: the server is not running.
        """
        self._call(lambda hub: hub.renew())

    def statistics(self) -> StoreStatistics:
        """Return the server's statistics.

        Raises:
            StoreError: the server is not running.
        """
        return self._call_in_slices(lambda hub: hub.statistics())

    # On the loop's thread.

    def _call(self, ask: Callable[[Hub], T]) -> T:
        """Run `ask` on the loop and return its result."""

        def in_one(hub: Hub) -> Generator[None, None, T]:
            yield from ()
            return ask(hub)

        return self._call_in_slices(in_one)

    def _call_in_slices(self, ask: Callable[[Hub], Generator[None, None, T]]) -> T:
        """Run a generator on the loop, one step per iteration, and return its result."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def begin() -> None:
            assert self._hub is not None
            step(ask(self._hub))

        def step(steps: Generator[None, None, T]) -> None:
            try:
                next(steps)
            except StopIteration as done:
                answer.set_result(done.value)
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread
                answer.set_exception(error)
            else:
                assert self._loop is not None
                self._loop.call_soon(step, steps)

        loop = self._loop
        if loop is None or self._is_closed:
            raise StoreError("the store server is not running", endpoint=self._endpoint)
        loop.call_soon_threadsafe(begin)
        try:
            return answer.result(timeout=_CLOSE_S)
        except concurrent.futures.TimeoutError:
            raise StoreTimeoutError(
                f"store server on {self._endpoint}: the event loop did not answer within "
                f"{_CLOSE_S:.0f} s. Is other code in this process holding the interpreter "
                "lock (GIL)?",
                endpoint=self._endpoint,
            ) from None

    @property
    def _endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def _prepare(self) -> None:
        """Create the loop and the hub without running them."""
        self._loop = _new_event_loop()
        self._hub = Hub(self._loop, self._limits, self._secret)

    def _run(self, on_ready: Callable[[], None]) -> None:
        """Serve until the loop is stopped, then release all resources."""
        loop, hub = self._loop, self._hub
        assert loop is not None
        assert hub is not None
        servers = [
            loop.run_until_complete(
                loop.create_server(lambda: Peer(hub), sock=listener, backlog=_BACKLOG)
            )
            for listener in self._sockets
        ]
        try:
            loop.call_soon(self._begin, on_ready)
            loop.run_forever()
        finally:
            for server in servers:
                server.close()
            hub.close()
            _finish(loop)
            for listener in self._sockets:
                listener.close()

    def _begin(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready`, or stop the loop if `stop_soon` has been called."""
        assert self._loop is not None
        self._is_serving = True
        if self._must_stop:
            self._loop.stop()
        else:
            on_ready()


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Send the remaining replies, then close the loop."""

    async def wind_down() -> None:
        await asyncio.sleep(_WIND_DOWN_S)
        await loop.shutdown_default_executor()

    rest = loop.create_task(wind_down())
    while not rest.done():
        with contextlib.suppress(RuntimeError):  # a second stop() was called in the meantime
            loop.run_until_complete(rest)
    loop.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop, or asyncio's if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        log.warning("store: uvloop is not installed; serving on asyncio's slower loop")
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _bind(host: str, port: int, may_bind_all: bool) -> list[socket.socket]:
    """Bind every address of `host`, using the same port for all.

    Raises:
        StoreError: no address could be bound.
    """
    if not host:
        raise ValueError("host must not be empty; use '0.0.0.0' to serve on all interfaces")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StoreError(f"store server: cannot resolve {host!r}: {error}") from None
    addresses = [(info[0], info[4]) for info in dict.fromkeys(found)]
    bound, problem = _bind_all(addresses, port)
    for _ in range(_BIND_TRIES):
        if port or problem is None or problem.errno != errno.EADDRINUSE:
            break
        for listener in bound:  # the port that was free for one address is taken for the next
            listener.close()
        bound, problem = _bind_all(addresses, port)
    if bound:
        return bound
    assert problem is not None
    if problem.errno == errno.EADDRNOTAVAIL and may_bind_all:
        log.warning("store: %s is not an address of this machine: binding all interfaces", host)
        return [_listen(socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104 - asked for, and authenticated
    hint = ""
    if problem.errno == errno.EADDRNOTAVAIL:
        hint = ". Bind an address of this machine, or '0.0.0.0' together with a secret"
    elif problem.errno == errno.EADDRINUSE:
        hint = ". Another server is using the port; use port 0 to get any free port"
    raise StoreError(
        f"store server: cannot bind {host}:{port}: {problem.strerror}{hint}",
        endpoint=f"{host}:{port}",
    )


def _bind_all(
    addresses: Sequence[tuple[int, Any]], port: int
) -> tuple[list[socket.socket], OSError | None]:
    """Bind as many addresses as possible, using one port; return the sockets and the last error."""
    bound: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in addresses:
        if bound:
            port = bound[0].getsockname()[1]
        try:
            bound.append(_listen(family, (str(address[0]), port, *address[2:])))
        except OSError as error:
            problem = error
    return bound, problem


def _listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a new socket that listens on `address`. The caller must close the socket."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep_alive(listener)  # what is accepted inherits it: a machine that is gone is noticed
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard limit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
