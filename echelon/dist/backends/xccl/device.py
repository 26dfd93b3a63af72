"""oneCCL on Intel GPUs: arrays on "xpu", on torch.xpu's streams. See `streams` for how it works.

Written against the library's symbols and its likeness to NCCL's interface. It has never run, since
no machine with an Intel GPU was at hand: what is tested is everything above the driver
(`tests/dist/test_streams.py`) and that each call has as many arguments as the library's own.

oneCCL cannot abort: an operation that never ends keeps its stream, its arrays are kept with it, and
the process ends without the library's destructors, which would wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from echelon.dist.backends.device.stream import StreamBackend
from echelon.dist.backends.interface import Members
from echelon.dist.backends.xccl import library
from echelon.dist.backends.xccl.ending import keep_for_ever
from echelon.store import PrefixStore


class XpuBackend(StreamBackend):
    """Carries out operations on an Intel GPU's arrays."""

    name = "xccl"
    device = "xpu"
    own_dtypes = frozenset(library.DTYPES)
    own_ops = frozenset({*library.REDUCE_OPS, "avg"})

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        self._communicator: Any = None
        super().__init__(members, store, timeout_s)

    def _draw_id(self) -> bytes:
        return library.unique_id(self.device)

    def _open(self, unique_id: bytes) -> None:
        self._communicator = library.Communicator(
            self._size, self._members.rank, unique_id, self.device, self._index
        )

    def _launch(self, kind: str, source: Any, target: Any, reduce_op: str, peer: int) -> None:
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
        self._communicator.call(*calls[kind], stream=int(self.stream.sycl_queue))

    def _together(self) -> AbstractContextManager[object]:
        return self._group()

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        self._communicator.group("GroupStart")
        try:
            yield
        finally:
            self._communicator.group("GroupEnd")

    def _failure(self) -> str:
        return ""  # the library has no call that tells

    def _abort(self) -> None:
        keep_for_ever(self._communicator, self._flying)

    def _close(self) -> None:
        self._communicator.close()
