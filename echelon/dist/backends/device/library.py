"""Define the interface that a device engine requires from a collectives library.

`DeviceLibrary` is the base class for NCCL on CUDA, oneCCL on Intel GPUs, and the fake device in the
tests. A group's state is held in communicators, each of which has one owner (see
`communicators/handle.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

from echelon.dist.backends.device.runtime import DeviceRuntime


class Communicator(Protocol):
    """A communicator of the library.

    While one thread is in a call, other threads must not call any method except `revoke`.
    """

    def launch(
        self, kind: str, source: Any, target: Any, reduce_op: str, peer: int, stream: Any
    ) -> None:
        """Queue one of the library's operations on a stream.

        The first call of each kind can block the host until all members have made the same call.

        Args:
            kind: all_reduce, reduce, all_gather, reduce_scatter, broadcast, send or recv.
            source, target: flat tensors; both are the same tensor for a broadcast.
            reduce_op: one of `DeviceLibrary.reduce_ops`; "" for a kind without a reduction.
            peer: the root of a collective, or the other rank of a message, as a rank within the
                communicator.
            stream: a stream of the communicator's device.
        """

    def failure(self) -> str:
        """Return the error that the library has detected, or "" if there is none."""

    def revoke(self) -> bool:
        """Abort running and blocked operations without freeing anything.

        This method can be called while another call is in progress.

        Returns:
            False if the library cannot abort operations in this way.
        """

    def abort(self) -> None:
        """Abort running operations and free the communicator."""

    def destroy(self) -> None:
        """Free an idle communicator. The call can block until the other members free theirs."""


class DeviceLibrary(DeviceRuntime, ABC):
    """A collectives library for one kind of device.

    Attributes:
        name: the name of the backend.
        dtypes: the dtypes that the library can reduce.
        reduce_ops: the reductions that the library supports.
    """

    name = ""
    device = ""
    dtypes: frozenset[str] = frozenset()
    reduce_ops: frozenset[str] = frozenset()

    def __init__(self, device: str = "") -> None:
        super().__init__(device or type(self).device)

    @abstractmethod
    def unique_id(self) -> bytes:
        """Generate an ID for a new communicator."""

    @abstractmethod
    def open(
        self, size: int, rank: int, unique_id: bytes, index: int, *, is_lane: bool
    ) -> Communicator:
        """Create a communicator on the current device; block until all members have joined.

        Args:
            size: the number of members.
            rank: this process's rank among the members.
            unique_id: the ID that rank 0 generated.
            index: the device index.
            is_lane: whether the communicator carries only messages between two ranks.
        """

    @abstractmethod
    def group(self) -> AbstractContextManager[object]:
        """Combine the calls that this thread makes inside the block into a single launch."""
