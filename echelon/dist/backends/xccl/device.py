"""Run oneCCL on Intel GPUs, with arrays on "xpu" and torch.xpu's streams.

See `device/engines/stream.py` for how operations are executed. This module is based on oneCCL's
header and has never run on an Intel GPU. The tests use a fake device, and check that each call
matches its declaration in the header.

oneCCL cannot abort operations. If an operation never completes, its stream and arrays are retained
until the process exits. The library's destructors, which would wait for the operation, are skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from echelon.dist.backends.device.engines.stream import StreamEngine
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.own_device import with_own_device
from echelon.dist.backends.interface import Members
from echelon.dist.backends.xccl import library
from echelon.dist.backends.xccl.ending import keep_for_ever
from echelon.store import PrefixStore


def create(members: Members, store: PrefixStore, timeout_s: float) -> StreamEngine:
    """Create the engine for a group; every member must call this.

    Raises:
        CollectiveTimeoutError: some members did not call this function within `timeout_s` seconds.
        RuntimeError: oneCCL reported an error.
    """
    made = XpuLibrary()
    return StreamEngine(made, with_own_device(members, made.accelerator), store, timeout_s)


class XpuLibrary(DeviceLibrary):
    """The oneCCL library for GPUs."""

    name = "xccl"
    device = "xpu"
    dtypes = frozenset(library.DTYPES)
    reduce_ops = frozenset({*library.REDUCE_OPS, "avg"})

    def unique_id(self) -> bytes:
        """Generate an ID for a new communicator."""
        return library.unique_id(self.device)

    def open(
        self,
        size: int,
        rank: int,
        unique_id: bytes,
        index: int,
        *,
        is_lane: bool,  # noqa: ARG002
    ) -> XpuCommunicator:
        """Create a communicator; block until all members have created theirs."""
        return XpuCommunicator(library.Communicator(size, rank, unique_id, self.device, index))

    def group(self) -> AbstractContextManager[object]:
        """Combine the calls that this thread makes inside the block into a single launch."""
        return _group(library.load(self.device))


class XpuCommunicator:
    """A oneCCL communicator."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def launch(
        self, kind: str, source: Any, target: Any, reduce_op: str, peer: int, stream: Any
    ) -> None:
        """Queue one of the library's operations on a stream."""
        given = source if source is not None else target
        dtype = library.DTYPES[str(given.dtype).removeprefix("torch.")]
        number = {**library.REDUCE_OPS, "avg": library.AVERAGE}.get(reduce_op, 0)
        into = given if target is None else target
        ends, count = (given.data_ptr(), into.data_ptr()), given.numel()
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": ("AllReduce", *ends, count, dtype, number),
            "reduce": ("Reduce", *ends, count, dtype, number, peer),
            "all_gather": ("AllGather", *ends, count, dtype),
            "reduce_scatter": ("ReduceScatter", *ends, into.numel(), dtype, number),
            "broadcast": ("Broadcast", *ends, count, dtype, peer),
            "send": ("Send", ends[0], count, dtype, peer),
            "recv": ("Recv", ends[1], count, dtype, peer),
        }
        self._communicator.call(*calls[kind], stream=int(stream.sycl_queue))

    def failure(self) -> str:
        """Return "", because the library has no call that reports errors."""
        return ""

    def revoke(self) -> bool:
        """Return False, because the library cannot revoke operations."""
        return False

    def abort(self) -> None:
        """Keep the communicator in memory, because the library cannot abort operations."""
        keep_for_ever(self._communicator)

    def destroy(self) -> None:
        """Free the communicator."""
        self._communicator.close()


@contextlib.contextmanager
def _group(loaded: Any) -> Iterator[None]:
    """Combine the library calls in a `with` block into one oneCCL group.

    If the block raises an exception, errors from `onecclGroupEnd` are ignored.
    """
    _check("GroupStart", loaded)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            _check("GroupEnd", loaded)
        raise
    _check("GroupEnd", loaded)


def _check(name: str, loaded: Any) -> None:
    result = getattr(loaded, f"oneccl{name}")()
    if result:
        raise RuntimeError(f"oneccl{name} failed ({result})")
