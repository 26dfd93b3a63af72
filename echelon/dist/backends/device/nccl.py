"""Provide the nccl backend, which calls NCCL through nccl4py to transfer CUDA arrays.

See `engines/stream.py` for how operations are executed. This module was written against nccl4py
0.6.0 and checked with NCCL 2.32, but no operation has run on a GPU yet. Most tests use a fake
device. The tests that need a GPU are marked `gpu`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager
from typing import Any, cast

from echelon.dist.backends.device.engines.stream import StreamEngine
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.own_device import with_own_device
from echelon.dist.backends.interface import Members
from echelon.store import PrefixStore

_SUCCESS, _IN_PROGRESS = 0, 7
# A kernel of a lane occupies the device while it waits for its peer: a small one leaves room for
# those of other lanes, and for the caller's own. Chosen without measurements.
_LANE_CTAS = 8
_PACKAGES = ("nccl4py", "cuda-bindings", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def not_ready() -> str:
    """Return the reason this machine cannot run the backend, or "" if it can."""
    for name in ("nccl", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"needs {name}: pip install '.[nccl,torch]'"
    try:
        importlib.import_module("nccl.core")
        torch: Any = importlib.import_module("torch")
    except Exception as err:  # noqa: BLE001 -- without a driver it fails in many ways
        return f"nccl4py cannot be loaded: {type(err).__name__}: {err}".splitlines()[0]
    return "" if torch.cuda.is_available() else "no CUDA device is usable here"


def versions() -> str:
    """Return the versions of torch's NCCL and of the packages that the backend needs.

    If a process loads two NCCL libraries, both torch and the backend use the library that was
    loaded first.
    """
    found = []
    with contextlib.suppress(Exception):  # a torch without NCCL
        torch: Any = importlib.import_module("torch")
        found.append(f"torch's NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def create(members: Members, store: PrefixStore, timeout_s: float) -> StreamEngine:
    """Create the engine for a group; every member must call this.

    If no array determines a member's device, the engine uses the program's current device or, if
    none is set, the GPU given by LOCAL_RANK.

    Raises:
        CollectiveTimeoutError: some members did not call this function within `timeout_s` seconds.
        nccl.core.NCCLError: NCCL reported an error.
    """
    library = NcclLibrary()
    return StreamEngine(library, with_own_device(members, library.accelerator), store, timeout_s)


def _needs_own_device() -> bool:
    """Return whether each rank needs its own GPU.

    In NCCL 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1 allows several ranks to share a GPU.
    """
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"


create.needs_own_device = _needs_own_device  # type: ignore[attr-defined]
create.versions = versions  # type: ignore[attr-defined]


class NcclLibrary(DeviceLibrary):
    """The NCCL library, called through nccl4py."""

    name = "nccl"
    device = "cuda"
    dtypes = frozenset({
        "float16", "bfloat16", "float32", "float64",
        "int8", "int32", "int64", "uint8", "uint32", "uint64",
    })  # fmt: skip
    reduce_ops = frozenset({"sum", "avg", "min", "max", "prod"})

    def __init__(self) -> None:
        super().__init__()
        self._nccl: Any = importlib.import_module("nccl.core")

    def unique_id(self) -> bytes:
        """Generate an ID for a new communicator."""
        return bytes(self._nccl.get_unique_id())

    def open(
        self, size: int, rank: int, unique_id: bytes, index: int, *, is_lane: bool
    ) -> NcclCommunicator:
        """Create a communicator on the current device; block until all members have joined."""
        del index  # NCCL takes the current device
        drawn = self._nccl.UniqueId.from_bytes(unique_id)
        config = self._nccl.NCCLConfig(max_ctas=_LANE_CTAS) if is_lane else None
        made = self._nccl.Communicator.init(size, rank, drawn, config)
        return NcclCommunicator(self._nccl, made)

    def group(self) -> AbstractContextManager[object]:
        """Combine the calls that this thread makes inside the block into a single launch."""
        return cast("AbstractContextManager[object]", self._nccl.group())


class NcclCommunicator:
    """An NCCL communicator."""

    def __init__(self, nccl: Any, communicator: Any) -> None:
        self._nccl = nccl
        self._communicator = communicator

    def launch(
        self, kind: str, source: Any, target: Any, reduce_op: str, peer: int, stream: Any
    ) -> None:
        """Queue an NCCL operation on a stream."""
        nccl, on = self._communicator, {"stream": int(stream.cuda_stream)}
        op = getattr(self._nccl, reduce_op.upper()) if reduce_op else None
        if kind == "all_reduce":
            nccl.allreduce(source, target, op, **on)
        elif kind == "reduce":
            nccl.reduce(source, target, op, root=peer, **on)
        elif kind == "all_gather":
            nccl.allgather(source, target, **on)
        elif kind == "reduce_scatter":
            nccl.reduce_scatter(source, target, op, **on)
        elif kind == "broadcast":
            nccl.broadcast(source, target, peer, **on)
        elif kind == "send":
            nccl.send(source, peer, **on)
        else:
            nccl.recv(target, peer, **on)

    def failure(self) -> str:
        """Return the error that NCCL has detected, or "" if there is none."""
        result = self._communicator.get_async_error()
        if int(result) in (_SUCCESS, _IN_PROGRESS):
            return ""
        said = str(self._communicator.get_last_error()).strip()
        return f"{result!s}: {said}" if said else str(result)

    def revoke(self) -> bool:
        """Abort running and blocked operations. This requires NCCL 2.29 or later."""
        revoke = getattr(self._communicator, "revoke", None)
        if revoke is None:
            return False
        revoke()
        return True

    def abort(self) -> None:
        """Abort running operations and free the communicator."""
        self._communicator.abort()

    def destroy(self) -> None:
        """Free the communicator; can block until the members on this host have freed theirs."""
        self._communicator.destroy()
