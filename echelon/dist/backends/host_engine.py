"""Provide the base class that the pure-Python, gloo and two-level engines share.

One thread runs the collectives in order (progress/serial.py), and another transfers messages
(messages/driver.py). Each thread starts when it is first needed. Callers only wait, so even a
signal handler can call any operation.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from echelon.dist.backends.interface import CHECK_EVERY_S, ConnectionBroken, Members, Pending, Watch
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import message_error
from echelon.dist.messages.driver import Driver, Streams
from echelon.dist.messages.protocol import Protocol
from echelon.dist.messages.transfer import Transfer, Withdrawable
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.serial import Serial
from echelon.errors import CollectiveError

CLOSE_S = 1.0


class HostEngine(ABC):
    """The base class of engines with blocking collectives and with messages over byte streams."""

    name = ""
    device = "cpu"
    nests = True
    needs_watcher = False

    def __init__(self, members: Members) -> None:
        self._members = members
        self._rank = members.rank
        self._size = members.size
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        self._serial = Serial(f"echelon-{self.name}", self.carry_out)
        self._driver: Driver | None = None

    def carry_messages(self, streams: Streams) -> None:
        """Set the byte streams that carry the group's messages."""
        protocol = Protocol(self._size, self._mismatch)
        self._driver = Driver(f"echelon-{self.name}-messages", protocol, streams, self._lost)

    @abstractmethod
    def carry_out(self, operation: Operation, watch: Watch) -> None:
        """Run the next collective on the calling thread; block until it is done."""

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Return "", because every operation is supported."""
        return ""

    def prepare(self, operation: Operation) -> None:  # noqa: B027 -- most have nothing to add
        """Do nothing, because no further checks are needed."""

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation; block until it is done on this rank."""
        if not operation.is_message:
            self._serial.run(operation, watch)
            return
        transfer = self._post(Transfer(operation, None))
        while not transfer.wait(CHECK_EVERY_S):
            transfer.check_with(watch)
        if transfer.error is not None:
            raise transfer.error

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation."""
        if operation.is_message:
            return self._post(Transfer(operation, watch))
        return self._serial.submit(operation, watch)

    def submit_shared(self, operation: Operation, watch: Watch) -> Transfer:
        """Start an any-source receive that can also be completed through another engine."""
        transfer = Transfer(operation, watch)
        transfer.is_shared = True
        return self._post(transfer)

    def submit_beside(self, operation: Operation, watch: Watch, rival: Withdrawable) -> Transfer:
        """Start an any-source receive that competes with `rival` for the same message."""
        transfer = Transfer(operation, watch)
        transfer.rival = rival
        return self._post(transfer)

    def batch(self) -> AbstractContextManager[object]:
        """Return a no-op context manager, because submitted operations start immediately."""
        return contextlib.nullcontext()

    def cut(self, reason: CollectiveError | None) -> None:
        """Abort all waits for messages. Collectives abort at their next call to `Watch.check`."""
        if self._driver is not None:
            self._driver.cut(reason or build.closed(self._members, Operation("close", 0)))

    def close_threads(self) -> bool:
        """Stop both threads; return whether they have stopped. Call `cut` first."""
        has_ended = self._serial.close(CLOSE_S)
        if self._driver is not None:
            has_ended &= self._driver.close(CLOSE_S)
        return has_ended

    def _post(self, transfer: Transfer) -> Transfer:
        assert self._driver is not None, "a group of one rank cannot send messages"
        self._driver.post(transfer)
        return transfer

    def _mismatch(self, receive: Transfer, sent: str) -> CollectiveError:  # noqa: ARG002
        return message_error(self._members, receive.operation, sorted((self._rank, receive.source)))

    def _lost(self, peer: int, why: str) -> BaseException:
        rank = self._members.ranks[peer]
        return ConnectionBroken(f"the connection with rank {rank} ended: {why}", peer)
