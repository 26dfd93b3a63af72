"""The nccl backend: real NCCL through nccl4py, on CUDA arrays. See `streams` for how it works.

Written against nccl4py 0.6.0. Its signatures, ids and groups were checked with the real library
(NCCL 2.32), but an operation has never run, since no machine with an NVIDIA GPU was at hand. What
is tested is everything above the driver, with a made-up driver (`tests/dist/test_streams.py`);
the tests of NCCL itself are marked `gpu`.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager
from typing import Any, cast

from echelon.dist.backends.device.stream import StreamBackend
from echelon.dist.backends.interface import Members
from echelon.store import PrefixStore

_SUCCESS, _IN_PROGRESS = 0, 7


def not_ready() -> str:
    """Say why this machine cannot run the backend; "" if it can."""
    for name in ("nccl", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"needs {name}: pip install '.[nccl,torch]'"
    try:
        importlib.import_module("nccl.core")
        torch: Any = importlib.import_module("torch")
    except Exception as err:  # noqa: BLE001 -- without a driver it fails in many ways
        return f"nccl4py cannot be loaded: {type(err).__name__}: {err}".splitlines()[0]
    return "" if torch.cuda.is_available() else "no CUDA device is usable here"


def create(members: Members, store: PrefixStore, timeout_s: float) -> NcclBackend:
    """Make the engine of a group; every member calls this.

    Raises:
        CollectiveTimeoutError: members did not come within `timeout_s`.
    """
    return NcclBackend(members, store, timeout_s)


class NcclBackend(StreamBackend):
    """Carries out operations on CUDA arrays."""

    name = "nccl"
    device = "cuda"
    own_dtypes = frozenset({
        "float16", "bfloat16", "float32", "float64",
        "int8", "int32", "int64", "uint8", "uint32", "uint64",
    })  # fmt: skip
    own_ops = frozenset({"sum", "avg", "min", "max", "prod"})

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        self._nccl: Any = importlib.import_module("nccl.core")
        self._communicator: Any = None
        super().__init__(members, store, timeout_s)

    def _draw_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def _open(self, unique_id: bytes) -> None:
        drawn = self._nccl.UniqueId.from_bytes(unique_id)
        self._communicator = self._nccl.Communicator.init(self._size, self._members.rank, drawn)

    def _launch(self, kind: str, source: Any, target: Any, reduce_op: str, peer: int) -> None:
        nccl, on = self._communicator, {"stream": int(self.stream.cuda_stream)}
        op = getattr(self._nccl, reduce_op.upper()) if reduce_op else None
        if kind == "all_reduce":
            nccl.allreduce(source, target, op, **on)
        elif kind == "reduce":
            nccl.reduce(source, target, op, peer, **on)
        elif kind == "all_gather":
            nccl.allgather(source, target, **on)
        elif kind == "reduce_scatter":
            nccl.reduce_scatter(source, target, op, **on)
        elif kind == "broadcast":
            nccl.broadcast(source, source if target is None else target, peer, **on)
        elif kind == "send":
            nccl.send(source, peer, **on)
        else:
            nccl.recv(target, peer, **on)

    def _together(self) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._nccl.group())

    def _failure(self) -> str:
        result = self._communicator.get_async_error()
        return "" if int(result) in (_SUCCESS, _IN_PROGRESS) else str(result)

    def _abort(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()

    def _close(self) -> None:
        self._communicator.destroy()
