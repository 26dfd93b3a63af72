"""A server's peers without sockets: bytes in, bytes out, on a loop that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from echelon.store.server.hub import Hub
from echelon.store.server.peer import Peer
from echelon.store.server.turns import Turns
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from tests.store.peers import OPENING


class Transport:
    """Takes what a peer writes; calls back after each write."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.on_write = lambda: None

    def write(self, data: bytes) -> None:
        self.written += data
        self.on_write()

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class World:
    """A hub and its peers; `limits` are those of `Limits`.

    Time stands still unless a `clock` is given, so that everything is executed in its first slice.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        in_c: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        **limits: int,
    ) -> None:
        self.loop = loop
        self.hub = Hub(loop, Limits(**limits), None)
        self.hub.turns = Turns(loop, clock)
        if not in_c:
            self.hub.executor = None

    def peer(self, *, is_ours: bool) -> tuple[Peer, Transport]:
        """Return a member and its transport, which has seen nothing yet."""
        peer, transport = Peer(self.hub), Transport()
        peer.connection_made(transport)
        peer.data_received(OPENING + p.encode(p.PING, p.OUR_NONCE if is_ours else 1))
        transport.written = b""
        return peer, transport

    def turn(self) -> None:
        """Run what is due on the loop, once."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
