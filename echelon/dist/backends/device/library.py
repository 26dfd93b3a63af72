"""What an engine on a device needs of a library of collectives.

`DeviceLibrary` is the base of NCCL on CUDA, of oneCCL on Intel GPUs, and of the made-up device that
the tests run. It holds no state of a group: communicators do, and each has one owner (`handle.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

from echelon.dist.backends.device.runtime import DeviceRuntime


class Communicator(Protocol):
    """A communicator of the library. One thread at a time calls it, but for `revoke`."""

    def launch(
        self, kind: str, source: Any, target: Any, reduce_op: str, peer: int, stream: Any
    ) -> None:
        """Queue one of the library's operations on a stream.

        The first call of a kind may block on the host until all members make it.

        Args:
            kind: all_reduce, reduce, all_gather, reduce_scatter, broadcast, send or recv.
            source, target: flat tensors; for a broadcast the same one.
            reduce_op: of `DeviceLibrary.reduce_ops`; "" if it does not reduce.
            peer: the root or the other end, as a rank of the communicator.
            stream: of the communicator's device.
        """

    def failure(self) -> str:
        """Return the error that the library has found since; "" if none."""

    def revoke(self) -> bool:
        """End what runs and what blocks inside, and free nothing; callable beside another call.

        Returns:
            False if the library cannot.
        """

    def abort(self) -> None:
        """End what runs and free the communicator."""

    def destroy(self) -> None:
        """Free a communicator on which nothing runs; may block until other members do so too."""


class DeviceLibrary(DeviceRuntime, ABC):
    """A library of collectives on one kind of device.

    Attributes:
        name: of the backend.
        dtypes: what the library reduces; bytes of any dtype can be moved.
        reduce_ops: the reductions that it has.
    """

    name = ""
    device = ""
    dtypes: frozenset[str] = frozenset()
    reduce_ops: frozenset[str] = frozenset()

    def __init__(self, device: str = "") -> None:
        super().__init__(device or type(self).device)

    @abstractmethod
    def unique_id(self) -> bytes:
        """Draw the id by which the members of a new communicator find each other."""

    @abstractmethod
    def open(
        self, size: int, rank: int, unique_id: bytes, index: int, *, is_lane: bool
    ) -> Communicator:
        """Make a communicator on the current device, which is `index`; block until all members do.

        Args:
            size: number of members.
            rank: of this process among them.
            unique_id: as rank 0 drew it.
            index: the device.
            is_lane: whether it carries messages between two ranks only.
        """

    @abstractmethod
    def group(self) -> AbstractContextManager[object]:
        """Launch what this thread calls inside as one."""
