"""Provide lanes, which transfer messages between the devices of two ranks.

A send blocks its stream and its communicator until the receive runs. Every lane therefore has its
own communicator and its own stream, so lanes never wait for each other. A lane carries messages
from one rank to another, in order, and is named after a tag or a channel.

A lane is created by its first message or by a call to `open`. Libraries establish a connection
during the first call that uses it, so one byte is sent over each new lane. The lane is open when
this byte has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echelon.dist.backends.device.clock import DeviceClock
from echelon.dist.backends.device.communicators.handle import Handle, HandleEnded
from echelon.dist.backends.device.communicators.launcher import Launcher
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.pending import DevicePending
from echelon.store import PrefixStore

_ASK_STORE_S = 0.01
_ASK_DEVICE_S = 0.0005
_SENDER, _RECEIVER = 0, 1
_MESSAGE = "message"  # all messages of a lane use one connection


@dataclass(frozen=True, slots=True)
class Way:
    """The identity of a lane: its name, and the group ranks of its sender and its receiver."""

    sender: int
    receiver: int
    name: str

    @property
    def path(self) -> str:
        """The prefix of the store keys through which the two ends of the lane find each other."""
        return f"lane/{self.sender}/{self.receiver}/{self.name}"


class Lane:
    """One end of a lane, which carries messages from one rank to another.

    Args:
        library: the library whose communicators carry the messages.
        way: the lane's direction and name.
        rank: this process's rank in the group.
        index: the index of this rank's device.
        store: the store through which the two ends of the lane find each other.
        clock: the clock of the device.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        way: Way,
        rank: int,
        index: int,
        store: PrefixStore,
        clock: DeviceClock,
    ) -> None:
        self.way = way
        self._library = library
        self._role = _SENDER if rank == way.sender else _RECEIVER
        self._index = index
        self._store = store
        self._clock = clock
        self._launcher = Launcher(f"echelon-lane-{way.sender}-{way.receiver}")
        self._handle: Handle | None = None
        self._first: Any = None  # the byte that connects
        self._arrival: Any = None  # the event behind it; None once it has happened
        self._is_over = False
        with library.accelerator.device(index):
            self.stream = library.accelerator.Stream()

    @property
    def is_connected(self) -> bool:
        """True once the lane is connected. From then on, messages do not block the host."""
        return self._launcher.knows(_MESSAGE)

    @property
    def handle(self) -> Handle | None:
        """The communicator, or None until it has been created."""
        return self._handle

    def launch(self, pending: DevicePending, check: Callable[[], None]) -> None:
        """Queue one message without blocking.

        Args:
            pending: the send on the sending rank, or the receive on the receiving rank.
            check: a function that raises an error if the operation or the group has ended.
        """

        def job() -> bool:
            try:
                with self._library.accelerator.device(self._index):
                    handle = self._open(check)
                    with handle.entered() as communicator:
                        pending.begin(self.stream, self._clock)
                        self.put(communicator, *pending.tensors)
                        pending.launched(self.stream)
            except Exception as err:  # noqa: BLE001 -- the group decides what it means
                pending.fail(err)
                return False
            return True

        self._launcher.launch(job, _MESSAGE)

    def put(self, communicator: Any, source: Any, target: Any, stream: Any = None) -> None:
        """Queue the transfer of a message on `stream`, or on the lane's own stream by default."""
        as_bytes = self._library.torch.uint8
        source = None if source is None else source.view(as_bytes)
        target = None if target is None else target.view(as_bytes)
        if (target if source is None else source).numel() == 0:
            return  # both ends know, since their sizes are equal
        kind, peer = ("send", _RECEIVER) if self._role == _SENDER else ("recv", _SENDER)
        on = self.stream if stream is None else stream
        communicator.launch(kind, source, target, "", peer, on)

    def open(
        self, opened: Callable[[BaseException | None], None], check: Callable[[], None]
    ) -> None:
        """Start connecting the lane, unless it is already connected or connecting. Does not block.

        Args:
            opened: a function that is called once, on any thread, with None on success or the error
                on failure.
            check: a function that raises an error if the operation or the group has ended.
        """

        def job() -> bool:
            try:
                with self._library.accelerator.device(self._index):
                    self._open(check)
            except Exception as err:  # noqa: BLE001 -- the group decides what it means
                opened(err)
                return False
            opened(None)
            return True

        self._launcher.launch(job, _MESSAGE)

    def abort(self, wait_s: float) -> bool:
        """Abort the lane; return whether its communicator was freed within `wait_s` seconds."""
        self._is_over = True
        return self._handle is None or self._handle.abort(wait_s)

    def destroy(self, wait_s: float) -> bool:
        """Free an idle lane's communicator; return whether it was freed within `wait_s` seconds."""
        self._is_over = True
        return self._handle is None or self._handle.destroy(wait_s)

    def _open(self, check: Callable[[], None]) -> Handle:
        handle = self._handle or self._connect(check)
        while self._arrival is not None and not self._library.has_happened(self._arrival):
            self._go_on(check)
            time.sleep(_ASK_DEVICE_S)
        self._arrival = None
        self._launcher.note(_MESSAGE)  # before the caller learns of it, who may capture at once
        return handle

    def _connect(self, check: Callable[[], None]) -> Handle:
        drawn = self._meet(check)
        made = self._library.open(2, self._role, drawn, self._index, is_lane=True)
        self._handle = handle = Handle(made)
        if self._is_over:  # the end came while the library connected
            handle.abort(0.0)
            raise HandleEnded
        torch = self._library.torch
        self._first = self._library.on_device(torch.zeros(1, dtype=torch.uint8), self._index)
        pair = (self._first, None) if self._role == _SENDER else (None, self._first)
        with handle.entered() as communicator:
            self.put(communicator, *pair)
        self._arrival = self._library.accelerator.Event()
        self._arrival.record(self.stream)
        return handle

    def _meet(self, check: Callable[[], None]) -> bytes:
        """Agree with the other end on the communicator's ID; block until that end is ready."""
        path, drawn = self.way.path, b""
        if self._role == _SENDER:
            drawn = self._library.unique_id()
            self._store.set(f"{path}/id", drawn)
            self._wait_for(f"{path}/ready", check)
            return drawn
        self._wait_for(f"{path}/id", check)
        drawn = self._store.get(f"{path}/id")
        self._store.set(f"{path}/ready", b"1")
        return drawn

    def _wait_for(self, key: str, check: Callable[[], None]) -> None:
        while not self._store.check([key]):
            self._go_on(check)
            time.sleep(_ASK_STORE_S)

    def _go_on(self, check: Callable[[], None]) -> None:
        if self._is_over:
            raise HandleEnded
        check()
