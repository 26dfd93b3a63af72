"""Carries a node's polls to the electors and their votes back: one call each, on a thread.

A poll is a session of one question, sealed like every other: an elector that does not know the
job's secret has no vote, and neither has one that does not answer within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from echelon.errors import LaunchError
from echelon.launcher.control.client import METHOD, open_channel
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.messages import Poll, Vote, pack, unpack
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import Seal, new_nonce
from echelon.launcher.control.tls import TlsFiles

_ANSWER_S = 1.0
_CLOSE_S = 3.0


class Canvasser:
    """Asks electors; `votes` receives (elector, poll, vote)."""

    def __init__(self, secret: bytes, tls: TlsFiles | None) -> None:
        self._secret = secret
        self._tls = tls
        self.votes: Mailbox[tuple[str, Poll, Vote]] = Mailbox()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="echelon-canvass", daemon=True
        )
        self._thread.start()

    def ask(self, name: str, endpoint: str, poll: Poll) -> None:
        """Ask the elector `name` at "host:port"; never blocks."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin, self._ask(name, endpoint, poll))

    def close(self) -> None:
        """End the thread; waits at most 3 s."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_CLOSE_S)
        self.votes.close()

    def _begin(self, asking: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    async def _ask(self, name: str, endpoint: str, poll: Poll) -> None:
        try:
            async with open_channel(endpoint, self._tls) as channel:
                vote = await asyncio.wait_for(self._call(channel, poll), _ANSWER_S)
        except (grpc.RpcError, LaunchError, OSError, asyncio.TimeoutError):
            return  # it is lost as well, or not reached from here
        self.votes.put((name, poll, vote))

    async def _call(self, channel: grpc.aio.Channel, poll: Poll) -> Vote:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        try:
            nonce = new_nonce()
            await call.write(nonce)
            seal = Seal(self._secret, nonce, await _frame(call), is_host=False)
            await call.write(seal.close(pack(poll)))
            vote = unpack(seal.open(await _frame(call)))
        finally:
            call.cancel()
        if not isinstance(vote, Vote):
            raise LaunchError("unexpected answer to a poll")
        return vote


async def _frame(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise LaunchError("the elector does not answer")
    return frame
