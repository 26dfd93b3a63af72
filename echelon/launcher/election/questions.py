"""Send requests to other launchers and receive their replies, with one gRPC call per request.

Each request is authenticated with the job's secret. A reply that does not arrive within one second
is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from echelon.errors import LaunchError
from echelon.launcher.control.client import METHOD, open_channel
from echelon.launcher.control.messages import Command, Event, pack, unpack
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import Seal, new_nonce
from echelon.launcher.control.tls import TlsFiles

_ANSWER_S = 1.0
_CLOSE_S = 3.0


class Questions:
    """A client that uses its own thread to send requests to other launchers."""

    def __init__(self, secret: bytes, tls: TlsFiles | None) -> None:
        self._secret = secret
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="echelon-questions", daemon=True
        )
        self._thread.start()

    def ask(
        self, endpoint: str, question: Event, on_answer: Callable[[Event | Command], None]
    ) -> None:
        """Send a request to the launcher at `endpoint` (host:port). Does not block.

        Args:
            on_answer: called with the reply, on this object's thread; never called if no reply
                arrives in time.
        """
        with contextlib.suppress(RuntimeError):
            asking = self._ask(endpoint, question, on_answer)
            self._loop.call_soon_threadsafe(self._begin, asking)

    def close(self) -> None:
        """Stop the thread, waiting up to 3 s for it to end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_CLOSE_S)

    def _begin(self, asking: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    async def _ask(
        self, endpoint: str, question: Event, on_answer: Callable[[Event | Command], None]
    ) -> None:
        try:
            async with open_channel(endpoint, self._tls) as channel:
                answer = await asyncio.wait_for(self._call(channel, question), _ANSWER_S)
        except (grpc.RpcError, LaunchError, OSError, asyncio.TimeoutError):
            return  # it is lost as well, or cannot be reached from here
        on_answer(answer)

    async def _call(self, channel: grpc.aio.Channel, question: Event) -> Event | Command:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        try:
            nonce = new_nonce()
            await call.write(nonce)
            seal = Seal(self._secret, nonce, await _frame(call), is_host=False)
            await call.write(seal.close(pack(question)))
            return unpack(seal.open(await _frame(call)))
        finally:
            call.cancel()


async def _frame(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise LaunchError("the peer ended the call without answering")
    return frame
